//! Settings: each is a flag and an environment variable of one name.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use chrono::TimeDelta;
use clap::builder::Resettable;
use clap::{Arg, Args, CommandFactory, FromArgMatches, Id, Parser, Subcommand};
use secrecy::{ExposeSecret, SecretString};

use crate::domain::effect::Patience;
use crate::domain::retry::Policy;
use crate::domain::route::{self, Routes};
use crate::domain::webhook::SigningSecret;

/// Makes n8n workflows safe to run twice.
#[derive(Debug, Parser)]
#[command(version, about)]
pub struct Cli {
    /// What to do; `serve` where nothing is said.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// The settings.
    #[command(flatten)]
    pub settings: Settings,
}

impl Cli {
    /// Reads the command line and the environment; ends the process where it is asked for help, or cannot read them. An
    /// empty variable counts as absent: a compose file sets what is absent to nothing.
    pub fn read() -> Self {
        let command = Self::command();
        let is_empty = |arg: &&Arg| {
            let value = arg.get_env().and_then(std::env::var_os);
            value.is_some_and(|value| value.is_empty())
        };
        let empty: Vec<Id> = command
            .get_arguments()
            .filter(is_empty)
            .map(|arg| arg.get_id().clone())
            .collect();
        let command = empty.into_iter().fold(command, |command, id| {
            command.mut_arg(id, |arg| arg.env(Resettable::Reset))
        });
        Self::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit())
    }
}

/// What the binary can do.
#[derive(Debug, Clone, Copy, Subcommand)]
pub enum Command {
    /// Migrate the database and serve (the default)
    Serve,
    /// Migrate the database and exit
    Migrate,
    /// Remove what has been over for longer than RETENTION, say how much that was, and exit
    Purge,
    /// Ask the service on this machine whether it is ready; exit 0 if it is
    Healthcheck,
    /// Print the OpenAPI description
    Openapi,
}

/// The settings.
#[derive(Debug, Args)]
pub struct Settings {
    /// Where keys are kept: postgres://… or sqlite:PATH [default: sqlite:dedup-gate.db]
    #[arg(long, env, global = true, hide_env_values = true)]
    database_url: Option<SecretString>,

    /// How long to wait for the database at start, in seconds
    #[arg(long, env, global = true, value_name = "SECONDS", default_value_t = 30)]
    database_wait: u32,

    /// How many connections to Postgres to hold at most
    #[arg(long, env, global = true, value_name = "COUNT", default_value_t = 16,
          value_parser = clap::value_parser!(u32).range(4..=1000))]
    pub database_connections: u32,

    /// Whether a pooler in transaction mode (`PgBouncer`) stands before Postgres [default: found out]
    #[arg(long, env, global = true, value_name = "BOOL")]
    pub database_pooler: Option<bool>,

    /// How many claims may wait to be decided
    #[arg(long, env, global = true, value_name = "NUMBER", default_value_t = 4096,
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub claim_queue: u32,

    /// How many claims go into one statement at most
    #[arg(long, env, global = true, value_name = "NUMBER", default_value_t = 256,
          value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub claim_batch: u32,

    /// Where to listen: ADDRESS:PORT. Beyond loopback, API_KEYS is required
    #[arg(
        long,
        env,
        global = true,
        value_name = "ADDRESS:PORT",
        default_value = "127.0.0.1:8080"
    )]
    listen: String,

    /// Who may call, as NAME:SECRET,…; a name may have several secrets
    #[arg(
        long,
        env,
        global = true,
        hide_env_values = true,
        value_name = "NAME:SECRET,…"
    )]
    api_keys: Option<SecretString>,

    /// How large the body of a request may be, in bytes
    #[arg(long, env, global = true, value_name = "BYTES", default_value_t = 262_144,
          value_parser = clap::value_parser!(u32).range(1024..=16_777_216))]
    pub body_limit: u32,

    /// How long a claimant that asks again is recognised after its claim, in seconds
    #[arg(long, env, global = true, value_name = "SECONDS", default_value_t = 1800,
          value_parser = clap::value_parser!(u32).range(1..=31_536_000))]
    pub replay_window: u32,

    /// How long settled entries, and keys claimed at the gate alone, are kept after their last change
    /// and their dedupe window, in seconds; a day at least [default: for ever]
    #[arg(long, env, global = true, value_name = "SECONDS",
          value_parser = clap::value_parser!(u32).range(86_400..=3_153_600_000))]
    retention: Option<u32>,

    /// How long to wait after each failed call, in seconds; as many tries as waits, at most 10
    #[arg(long, env, global = true, value_name = "SECONDS,…", value_delimiter = ',',
          default_value = "1,2,5", value_parser = clap::value_parser!(u32).range(0..=86_400))]
    retry_waits: Vec<u32>,

    /// How long a provider may ask to be left alone before it is given up, in seconds
    #[arg(long, env, global = true, value_name = "SECONDS", default_value_t = 300,
          value_parser = clap::value_parser!(u32).range(0..=31_536_000))]
    retry_after_limit: u32,

    /// Where effects are delivered, as TOPIC=URL,…; the topic * stands for every other
    #[arg(
        long,
        env,
        global = true,
        hide_env_values = true,
        value_name = "TOPIC=URL,…"
    )]
    outbox_routes: Option<SecretString>,

    /// What deliveries are signed with, each as `whsec_` and 24 to 64 bytes in base64 [default: they
    /// are not signed]
    #[arg(
        long,
        env,
        global = true,
        hide_env_values = true,
        value_name = "SECRET,…"
    )]
    outbox_secrets: Option<SecretString>,

    /// Which hosts may be delivered to although they are link-local, or a cloud's metadata
    #[arg(long, env, global = true, value_name = "HOST,…")]
    outbox_allowed_hosts: Option<String>,

    /// How long a receiver may take to answer, in seconds
    #[arg(long, env, global = true, value_name = "SECONDS", default_value_t = 15,
          value_parser = clap::value_parser!(u32).range(1..=120))]
    outbox_timeout: u32,

    /// How long to wait after each failed delivery, in seconds; as many retries as waits, at most 20
    #[arg(long, env, global = true, value_name = "SECONDS,…", value_delimiter = ',',
          default_value = "5,30,120,600,1800,7200,18000,36000",
          value_parser = clap::value_parser!(u32).range(0..=2_592_000))]
    outbox_retry_waits: Vec<u32>,

    /// Serve the lab at /lab: retries of one payment, with and without a key
    #[arg(long, env, global = true, value_parser = switch)]
    pub lab: bool,
}

/// Whether something is on. A compose file sets what is absent to nothing.
fn switch(text: &str) -> Result<bool, &'static str> {
    match text {
        "true" | "1" => Ok(true),
        "" | "false" | "0" => Ok(false),
        _ => Err("must be true or false"),
    }
}

/// How many tries there may be.
const MAX_TRIES: usize = 10;

/// How often a delivery may be repeated.
const MAX_RETRIES: usize = 20;

/// Where keys are kept.
#[derive(Debug)]
pub enum Database {
    /// A Postgres server; the URL as libpq takes it.
    Postgres(SecretString),
    /// A SQLite file.
    Sqlite(String),
}

/// A name and one of its secrets.
#[derive(Debug, Clone)]
pub struct ApiKey {
    /// Who calls.
    pub name: String,
    /// What they send.
    pub secret: SecretString,
}

impl Settings {
    /// Where keys are kept.
    ///
    /// # Errors
    ///
    /// `DATABASE_URL` is neither Postgres nor SQLite.
    pub fn database(&self) -> Result<Database, String> {
        let url = given(self.database_url.as_ref()).unwrap_or("sqlite:dedup-gate.db");
        if url.starts_with("postgres://") || url.starts_with("postgresql://") {
            if !is_readable(url) {
                return Err(
                    "DATABASE_URL cannot be read; in a user's name and password write % as %25, @ as %40, / as %2F and : as %3A".into(),
                );
            }
            return Ok(Database::Postgres(url.into()));
        }
        let path = url
            .strip_prefix("sqlite://")
            .or_else(|| url.strip_prefix("sqlite:"));
        match path {
            Some("") => {
                Err("DATABASE_URL: sqlite: needs a path, such as sqlite:dedup-gate.db".into())
            }
            Some(path) if path.contains(":memory:") || path.starts_with("file:") => Err(
                "DATABASE_URL: keys must outlive the process, so sqlite: takes the path of a file and nothing else".into(),
            ),
            Some(path) => Ok(Database::Sqlite(path.to_owned())),
            None => {
                // Only the scheme is repeated: the rest may hold a password.
                let scheme = url.split_once(':').map_or("none", |(scheme, _)| scheme);
                Err(format!(
                    "DATABASE_URL: the scheme {scheme:?} is not supported; use postgres://… or sqlite:PATH"
                ))
            }
        }
    }

    /// How long to wait for the database at start.
    pub fn database_wait(&self) -> Duration {
        Duration::from_secs(self.database_wait.into())
    }

    /// How long what is over is kept; none: for ever.
    ///
    /// # Errors
    ///
    /// It is forgotten while its claimant is recognised: who asks again would do it again.
    pub fn retention(&self) -> Result<Option<TimeDelta>, String> {
        match self.retention {
            Some(kept) if kept < self.replay_window => Err(format!(
                "RETENTION is shorter than REPLAY_WINDOW ({} s): a claimant that asks again would be told to do the work again",
                self.replay_window
            )),
            kept => Ok(kept.map(|seconds| TimeDelta::seconds(seconds.into()))),
        }
    }

    /// Where to listen.
    ///
    /// # Errors
    ///
    /// `LISTEN` is not an address and a port.
    pub fn listen(&self) -> Result<Vec<SocketAddr>, String> {
        self.listen
            .to_socket_addrs()
            .map(Iterator::collect)
            .map_err(|error| format!("LISTEN: {:?} is not ADDRESS:PORT ({error})", self.listen))
    }

    /// How failed calls are repeated.
    ///
    /// # Errors
    ///
    /// `RETRY_WAITS` has too many of them.
    pub fn retry_policy(&self) -> Result<Policy, String> {
        if self.retry_waits.len() > MAX_TRIES {
            return Err(format!(
                "RETRY_WAITS: {} waits are more than {MAX_TRIES}",
                self.retry_waits.len()
            ));
        }
        Ok(Policy {
            waits: self.retry_waits.clone(),
            retry_after_limit: self.retry_after_limit,
        })
    }

    /// Who may call; nobody has to say where the list is empty.
    ///
    /// # Errors
    ///
    /// `API_KEYS` is not a list of names and secrets, or leaves open who a secret belongs to.
    pub fn api_keys(&self) -> Result<Vec<ApiKey>, String> {
        let Some(list) = given(self.api_keys.as_ref()) else {
            return Ok(Vec::new());
        };
        let mut keys: Vec<ApiKey> = Vec::new();
        for (entry, number) in list.split(',').zip(1..) {
            let (name, secret) = entry
                .trim()
                .split_once(':')
                .ok_or_else(|| format!("API_KEYS: entry {number} is not NAME:SECRET"))?;
            let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            if name.is_empty() || name.len() > 64 || !name.chars().all(is_name) {
                return Err(format!(
                    "API_KEYS: the name of entry {number} must be 1 to 64 letters, digits, '-', '_' or '.'"
                ));
            }
            if secret.is_empty() || !secret.chars().all(|c| c.is_ascii_graphic()) {
                return Err(format!(
                    "API_KEYS: the secret of entry {number} must be printable ASCII without spaces, and not empty"
                ));
            }
            if keys
                .iter()
                .any(|key| key.secret.expose_secret() == secret && key.name != name)
            {
                return Err(format!(
                    "API_KEYS: the secret of entry {number} belongs to another name too"
                ));
            }
            keys.push(ApiKey {
                name: name.to_owned(),
                secret: secret.into(),
            });
        }
        Ok(keys)
    }

    /// Where effects are delivered; nowhere where nothing is said.
    ///
    /// # Errors
    ///
    /// `OUTBOX_ROUTES` is not a list of topics and URLs, or one of its hosts is forbidden, or
    /// `OUTBOX_ALLOWED_HOSTS` is not a list of hosts.
    pub fn outbox_routes(&self) -> Result<Routes, String> {
        match given(self.outbox_routes.as_ref()) {
            Some(routes) => Routes::parse(routes, &self.outbox_allowed_hosts()?),
            None => Ok(Routes::default()),
        }
    }

    /// What deliveries are signed with; they are not where there is nothing.
    ///
    /// # Errors
    ///
    /// `OUTBOX_SECRETS` is not a list of secrets.
    pub fn outbox_secrets(&self) -> Result<Vec<SigningSecret>, String> {
        given(self.outbox_secrets.as_ref()).map_or(Ok(Vec::new()), SigningSecret::parse_list)
    }

    /// Which hosts may be delivered to whatever their addresses are.
    ///
    /// # Errors
    ///
    /// `OUTBOX_ALLOWED_HOSTS` is not a list of hosts.
    pub fn outbox_allowed_hosts(&self) -> Result<Vec<String>, String> {
        let hosts = self.outbox_allowed_hosts.as_deref();
        let hosts = hosts.filter(|hosts| !hosts.is_empty());
        hosts.map_or(Ok(Vec::new()), route::parse_hosts)
    }

    /// How long a receiver may take to answer.
    pub fn outbox_timeout(&self) -> Duration {
        Duration::from_secs(self.outbox_timeout.into())
    }

    /// How often a delivery is tried, and how long it waits between tries.
    ///
    /// # Errors
    ///
    /// `OUTBOX_RETRY_WAITS` has too many waits.
    pub fn outbox_patience(&self) -> Result<Patience, String> {
        if self.outbox_retry_waits.len() > MAX_RETRIES {
            return Err(format!(
                "OUTBOX_RETRY_WAITS: {} waits are more than {MAX_RETRIES}",
                self.outbox_retry_waits.len()
            ));
        }
        Ok(Patience {
            waits: self.outbox_retry_waits.clone(),
        })
    }
}

/// Whether libpq can read the user's part and the hosts of a URL. It would repeat what it cannot
/// read, and that may be a piece of a password with an `@` or a `/` that is not encoded.
fn is_readable(url: &str) -> bool {
    let is_code = |code: &[u8]| code.iter().all(u8::is_ascii_hexdigit) && code != b"00";
    let mut after_percent = url.split('%').skip(1).map(str::as_bytes);
    let is_encoded = after_percent.all(|text| text.get(..2).is_some_and(is_code));
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let hosts = match rest.split_once('@') {
        Some((user, rest)) if !user.contains('/') => rest,
        _ => rest,
    };
    let hosts = hosts.split(['/', '?']).next().unwrap_or_default();
    let is_host = |host: &str| {
        // The colons of an IPv6 address stand in brackets.
        let host = host.rsplit_once(']').map_or(host, |(_, port)| port);
        let port = host.split_once(':').map_or("", |(_, port)| port);
        port.bytes().all(|digit| digit.is_ascii_digit())
    };
    is_encoded && !hosts.contains('@') && hosts.split(',').all(is_host)
}

/// A setting that is not empty: a compose file sets what is absent to nothing.
fn given(setting: Option<&SecretString>) -> Option<&str> {
    setting
        .map(ExposeSecret::expose_secret)
        .filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(arguments: &[&str]) -> Settings {
        Cli::parse_from([&["dedup-gate"], arguments].concat()).settings
    }

    #[test]
    fn a_sqlite_file_is_named_in_two_ways() {
        for (url, path) in [
            ("sqlite:gate.db", "gate.db"),
            ("sqlite://gate.db", "gate.db"),
            ("sqlite:/data/gate.db", "/data/gate.db"),
            ("sqlite:///data/gate.db", "/data/gate.db"),
        ] {
            let database = settings(&["--database-url", url]).database().unwrap();
            assert!(matches!(database, Database::Sqlite(found) if found == path));
        }
    }

    #[test]
    fn what_does_not_last_or_is_unknown_is_refused_without_repeating_secrets() {
        for url in [
            "sqlite:",
            "sqlite::memory:",
            "sqlite:file:x?mode=memory",
            "mysql://root:hunter2@localhost/x",
            "hunter2",
        ] {
            let refused = settings(&["--database-url", url]).database().unwrap_err();
            assert!(refused.starts_with("DATABASE_URL: "), "{refused}");
            assert!(!refused.contains("hunter2"), "{refused}");
        }
    }

    #[test]
    fn secrets_do_not_show_in_debug() {
        let all = settings(&[
            "--database-url",
            "postgres://u:hunter2@h/d",
            "--api-keys",
            "n8n:hunter2",
            "--outbox-routes",
            "a=http://hunter2@h/hunter2",
            "--outbox-secrets",
            "whsec_hunter2hunter2hunter2hunter2hunt",
        ]);
        assert!(!format!("{all:?}").contains("hunter2"));
        assert!(!format!("{:?}", all.api_keys().unwrap()).contains("hunter2"));
        assert!(!format!("{:?}", all.database().unwrap()).contains("hunter2"));
        assert!(!format!("{:?}", all.outbox_routes().unwrap()).contains("hunter2"));
        assert!(!format!("{:?}", all.outbox_secrets().unwrap()).contains("hunter2"));
    }

    #[test]
    fn there_are_as_many_tries_as_waits() {
        let policy = |arguments: &[&str]| settings(arguments).retry_policy();
        assert_eq!(policy(&[]).unwrap().waits, [1, 2, 5]);
        assert_eq!(policy(&["--retry-waits", "0"]).unwrap().waits, [0]);
        let ten = "1,1,1,1,1,1,1,1,1,60";
        assert_eq!(policy(&["--retry-waits", ten]).unwrap().waits.len(), 10);
        let refused = policy(&["--retry-waits", &format!("{ten},60")]).unwrap_err();
        assert!(refused.starts_with("RETRY_WAITS: "), "{refused}");
        for bad in ["", "1,", "-1", "1.5", "soon", "1;2", "86401"] {
            let arguments = ["dedup-gate", &format!("--retry-waits={bad}")];
            assert!(Cli::try_parse_from(arguments).is_err(), "{bad}");
        }
    }

    #[test]
    fn api_keys_are_names_and_secrets() {
        let keys = settings(&["--api-keys", "n8n:old, n8n:new,shop:a:b"])
            .api_keys()
            .unwrap();
        let names: Vec<&str> = keys.iter().map(|key| key.name.as_str()).collect();
        assert_eq!(names, ["n8n", "n8n", "shop"]);
        assert_eq!(keys[2].secret.expose_secret(), "a:b");
        assert!(settings(&["--api-keys", ""]).api_keys().unwrap().is_empty());
        for bad in [
            "hunter2",
            ":hunter2",
            "n8n:",
            "a:hunter2,b:hunter2",
            "n8n:hünter2",
            "a b:hunter2",
        ] {
            let refused = settings(&["--api-keys", bad]).api_keys().unwrap_err();
            assert!(!refused.contains("hunter2"), "{refused}");
        }
    }

    #[test]
    fn what_the_outbox_is_not_told_is_absent() {
        for arguments in [
            &[][..],
            &[
                "--outbox-routes=",
                "--outbox-secrets=",
                "--outbox-allowed-hosts=",
            ],
        ] {
            let settings = settings(arguments);
            assert_eq!(settings.outbox_routes().unwrap().iter().count(), 0);
            assert!(settings.outbox_secrets().unwrap().is_empty());
            assert!(settings.outbox_allowed_hosts().unwrap().is_empty());
        }
    }

    #[test]
    fn effects_go_to_a_forbidden_host_only_where_it_is_named() {
        let routes = "--outbox-routes=a=http://a.example/,b=http://169.254.7.7/";
        let refused = settings(&[routes]).outbox_routes().unwrap_err();
        assert!(refused.starts_with("OUTBOX_ROUTES: "), "{refused}");
        let allowed = "--outbox-allowed-hosts=x,169.254.7.7";
        let routes_of = |settings: &Settings| settings.outbox_routes().unwrap().iter().count();
        assert_eq!(routes_of(&settings(&[routes, allowed])), 2);
        let refused = settings(&[routes, "--outbox-allowed-hosts=http://h/"])
            .outbox_routes()
            .unwrap_err();
        assert!(refused.starts_with("OUTBOX_ALLOWED_HOSTS: "), "{refused}");
    }

    #[test]
    fn an_answer_takes_from_one_second_to_two_minutes() {
        let of = |arguments: &[&str]| settings(arguments).outbox_timeout().as_secs();
        assert_eq!(of(&[]), 15);
        assert_eq!(of(&["--outbox-timeout", "120"]), 120);
        for bad in ["", "0", "121", "1.5"] {
            let arguments = ["dedup-gate", &format!("--outbox-timeout={bad}")];
            assert!(Cli::try_parse_from(arguments).is_err(), "{bad}");
        }
    }

    #[test]
    fn there_are_as_many_retries_as_waits() {
        let waits = |arguments: &[&str]| {
            settings(arguments)
                .outbox_patience()
                .map(|patience| patience.waits)
        };
        assert_eq!(
            waits(&[]).unwrap(),
            [5, 30, 120, 600, 1800, 7200, 18_000, 36_000]
        );
        let twenty = vec!["2592000"; 20].join(",");
        let of = |list: &str| waits(&[&format!("--outbox-retry-waits={list}")]);
        assert_eq!(of(&twenty).unwrap().len(), 20);
        let refused = of(&format!("{twenty},1")).unwrap_err();
        assert!(refused.starts_with("OUTBOX_RETRY_WAITS: "), "{refused}");
        for bad in ["", "1,", "-1", "1.5", "soon", "1;2", "2592001"] {
            let arguments = ["dedup-gate", &format!("--outbox-retry-waits={bad}")];
            assert!(Cli::try_parse_from(arguments).is_err(), "{bad}");
        }
    }
}
