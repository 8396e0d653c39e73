//! Running it: settings, start, refusal to start, and the end.

use std::io::{BufRead, BufReader, Lines, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::helpers::postgres::{Postgres, SHARED, free_port, psql};
use super::helpers::service::{BINARY, command, finish, refusal, run};
use super::helpers::{Backend, Database, Service, on_both, wait_until};

/// A secret that no output may repeat.
const SECRET: &str = "hunter2correcthorse";

fn claim(service: &Service, key: &str) -> Value {
    service.claim(json!({"idempotency_key": key, "claimant": "a"}))
}

fn address(service: &Service) -> &str {
    service.base.trim_start_matches("http://")
}

/// A database whose URL is this, be there one or not.
fn at(url: impl Into<String>) -> Database {
    Database::at(url.into())
}

// What is served without and with settings.

#[test]
fn without_settings_it_serves_a_file_in_the_working_directory() {
    for url in [None, Some("")] {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new(BINARY);
        command
            .env_clear()
            .env("LISTEN", "127.0.0.1:0")
            .envs(url.map(|url| ("DATABASE_URL", url)))
            .current_dir(&folder);
        let service = Service::spawn(Arc::new(Database::new(Backend::Sqlite)), command);
        assert_eq!(claim(&service, "key")["claimed"], true);
        let found = Command::new("sqlite3")
            .arg(folder.path().join("dedup-gate.db"))
            .arg("SELECT idempotency_key FROM processed_orders")
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(found.stdout).unwrap(), "key\n");
    }
}

/// A compose file sets what is absent to nothing.
#[test]
fn an_empty_variable_is_as_good_as_none() {
    let help = run(&at(""), &["--help"], &[]).stdout;
    let help = String::from_utf8(help).unwrap();
    let variables: Vec<&str> = help
        .split("[env: ")
        .skip(1)
        .map(|rest| rest.split([']', '=']).next().unwrap())
        .collect();
    assert!(variables.len() > 15, "{variables:?}");
    let mut settings: Vec<(&str, &str)> = variables.iter().map(|name| (*name, "")).collect();
    let database = Database::new(Backend::Sqlite);
    let url = database.url.clone();
    settings.extend([("DATABASE_URL", url.as_str()), ("LISTEN", "127.0.0.1:0")]);
    let service = Service::start_on(database, &settings);
    assert_eq!(claim(&service, "key")["claimed"], true);
}

#[test]
fn settings_are_flags_as_well() {
    let database = Arc::new(Database::new(Backend::Sqlite));
    let mut command = Command::new(BINARY);
    command.env_clear().args([
        "serve",
        "--database-url",
        &database.url,
        "--listen=127.0.0.1:0",
        &format!("--api-keys=n8n:{SECRET}"),
        "--body-limit=1024",
    ]);
    let service = Service::spawn(Arc::clone(&database), command);
    let claim = |payload: &str| json!({"idempotency_key": "key", "payload": payload});
    assert_eq!(
        service.post("/claim", &claim("")).problem(401),
        "unauthorized"
    );
    assert_eq!(
        service.post_as(SECRET, "/claim", &claim("")).ok()["claimed"],
        true
    );
    let reply = service.post_as(SECRET, "/claim", &claim(&"x".repeat(1024)));
    assert_eq!(reply.problem(413), "payload_too_large");
    assert_eq!(database.sql("SELECT count(*) FROM processed_orders"), "1");
}

#[test]
fn help_names_each_setting_with_its_flag_and_repeats_no_secret() {
    let url = format!("postgres://gate:{SECRET}@127.0.0.1/gate");
    let keys = format!("n8n:{SECRET}");
    let routes = format!("*=https://{SECRET}@h/");
    let settings = [
        ("API_KEYS", keys.as_str()),
        ("OUTBOX_ROUTES", &routes),
        ("OUTBOX_SECRETS", SECRET),
    ];
    for arguments in [["--help"], ["-h"], ["help"]] {
        let output = run(&at(&url), &arguments, &settings);
        assert!(output.status.success());
        let help = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        for flag in [
            "database-url",
            "database-wait",
            "listen",
            "api-keys",
            "body-limit",
            "replay-window",
            "retry-waits",
            "retry-after-limit",
            "outbox-routes",
            "outbox-secrets",
            "outbox-allowed-hosts",
            "outbox-timeout",
            "outbox-retry-waits",
        ] {
            assert!(help.contains(&format!("--{flag}")), "{help}");
            let variable = flag.to_uppercase().replace('-', "_");
            assert!(help.contains(&format!("[env: {variable}")), "{help}");
        }
        assert!(help.contains("[default: 127.0.0.1:8080]"), "{help}");
        assert!(!help.contains(SECRET), "{help}");
    }
}

// The other commands.

#[test]
fn migrate_makes_the_tables_and_ends() {
    for backend in Backend::ALL {
        let database = Database::new(backend);
        for _ in 0..2 {
            let output = run(&database, &["migrate"], &[]);
            assert!(output.status.success(), "{output:?}");
        }
        for table in ["processed_orders", "run_ledger", "run_history"] {
            assert_eq!(database.sql(&format!("SELECT count(*) FROM {table}")), "0");
        }
        let service = Service::start_on(database, &[]);
        assert_eq!(claim(&service, "key")["claimed"], true);
    }
}

#[test]
fn openapi_prints_what_is_served() {
    let service = Service::start(Backend::Sqlite);
    let output = run(&at("none:"), &["openapi"], &[]);
    assert!(output.status.success(), "{output:?}");
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(printed, service.get("/openapi.json").ok());
    assert!(printed["paths"]["/claim"]["post"].is_object());
}

#[test]
fn healthcheck_succeeds_where_the_service_is_ready() {
    on_both(|service| {
        let check = run(&at(""), &["healthcheck"], &[("LISTEN", address(service))]);
        assert!(check.status.success(), "{check:?}");
    });
}

#[test]
fn healthcheck_finds_a_service_that_listens_everywhere() {
    let everywhere = [("LISTEN", "0.0.0.0:0"), ("API_KEYS", "n8n:secret")];
    let service = Service::start_on(Database::new(Backend::Sqlite), &everywhere);
    let check = run(&at(""), &["healthcheck"], &[("LISTEN", address(&service))]);
    assert!(check.status.success(), "{check:?}");
}

#[test]
fn healthcheck_fails_where_nobody_listens() {
    let listen = format!("127.0.0.1:{}", free_port());
    let line = refusal(&run(&at(""), &["healthcheck"], &[("LISTEN", &listen)]));
    assert!(line.contains(&listen), "{line}");
}

#[test]
fn healthcheck_fails_where_the_database_is_gone() {
    let service = Service::start(Backend::Postgres);
    let check = || run(&at(""), &["healthcheck"], &[("LISTEN", address(&service))]);
    assert!(check().status.success());
    let (_, name) = service.database.url.rsplit_once('/').unwrap();
    let end = format!(
        "ALTER DATABASE {name} ALLOW_CONNECTIONS false; \
         SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    );
    SHARED.try_sql("postgres", &end).unwrap();
    let line = refusal(&check());
    assert!(line.contains("503"), "{line}");
    assert_eq!(service.get("/health").status, 200);
}

// What is refused.

#[test]
fn an_unsupported_database_is_refused_without_its_password() {
    for (url, says) in [
        (format!("mysql://gate:{SECRET}@127.0.0.1/gate"), "\"mysql\""),
        (format!("redis://:{SECRET}@127.0.0.1"), "\"redis\""),
        (
            format!("POSTGRES://gate:{SECRET}@127.0.0.1/gate"),
            "\"POSTGRES\"",
        ),
        (format!("//gate:{SECRET}@127.0.0.1/gate"), "postgres://"),
        (format!("host=127.0.0.1 password={SECRET}"), "postgres://"),
        ("dedup-gate.db".into(), "sqlite:PATH"),
        ("sqlite:".into(), "needs a path"),
        ("sqlite::memory:".into(), "outlive"),
    ] {
        for arguments in [&["serve"], &["migrate"]] {
            let line = refusal(&run(&at(&url), arguments, &[]));
            assert!(line.contains("DATABASE_URL"), "{line}");
            assert!(line.contains(says), "{line}");
            assert!(!line.contains(SECRET), "{line}");
        }
    }
}

/// libpq repeats what it cannot read of a URL, so it must not get to see such a one.
#[test]
fn a_url_whose_password_is_not_encoded_is_refused_without_it() {
    for password in [
        format!("{SECRET}%zz"),
        format!("{SECRET}%"),
        format!("a@{SECRET}"),
        format!("{SECRET}@a"),
        format!("{SECRET}/a"),
        format!("a/{SECRET}"),
        format!("{SECRET}:a/b@c"),
    ] {
        let url = format!("postgres://gate:{password}@127.0.0.1:{}/gate", free_port());
        let line = refusal(&run(&at(&url), &[], &[]));
        assert!(!line.contains(SECRET), "{line}");
        assert!(line.contains("DATABASE_URL"), "{line}");
        assert!(line.contains("%40"), "{line}");
    }
}

#[test]
fn a_url_with_an_encoded_password_is_used() {
    SHARED
        .try_sql(
            "postgres",
            "CREATE ROLE encoded LOGIN SUPERUSER PASSWORD 'a@/%:?#b'",
        )
        .unwrap();
    let database = Database::new(Backend::Postgres);
    let url = database
        .url
        .replace("postgres@", "encoded:a%40%2F%25%3A%3F%23b@");
    let service = Service::start_on(at(url), &[]);
    assert_eq!(claim(&service, "key")["claimed"], true);
}

#[test]
fn a_database_that_stays_away_ends_the_start() {
    let unreachable = format!("postgres://gate:{SECRET}@127.0.0.1:{}/gate", free_port());
    let absent = SHARED
        .url("absent")
        .replace("postgres@", &format!("postgres:{SECRET}@"));
    for url in [unreachable, absent] {
        let line = refusal(&run(&at(url), &[], &[]));
        assert!(line.contains("DATABASE_WAIT"), "{line}");
        assert!(!line.contains(SECRET), "{line}");
    }
}

#[test]
fn a_file_that_cannot_be_opened_ends_the_start() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("text"), "no database at all, but a text").unwrap();
    for path in ["missing/gate.db", "text", "."] {
        let url = format!("sqlite:{}/{path}", folder.path().display());
        let line = refusal(&run(&at(url), &[], &[]));
        assert!(line.contains(path), "{line}");
    }
}

#[test]
fn a_listener_beyond_loopback_needs_api_keys() {
    let database = Database::new(Backend::Sqlite);
    for listen in ["0.0.0.0:0", "[::]:0", "192.0.2.1:0"] {
        for keys in [None, Some("")] {
            let mut settings = vec![("LISTEN", listen)];
            settings.extend(keys.map(|keys| ("API_KEYS", keys)));
            let line = refusal(&run(&database, &[], &settings));
            assert!(line.contains("API_KEYS=n8n:SECRET"), "{line}");
        }
    }
    assert!(!Path::new(&database.path()).exists());
    let settings = [("LISTEN", "0.0.0.0:0"), ("API_KEYS", "n8n:secret")];
    let service = Service::start_on(database, &settings);
    assert_eq!(service.get("/health").status, 200);
}

#[test]
fn a_listener_on_loopback_needs_no_api_keys() {
    for listen in ["127.0.0.1:0", "127.8.8.8:0", "localhost:0"] {
        let database = Database::new(Backend::Sqlite);
        let service = Service::start_on(database, &[("LISTEN", listen)]);
        assert_eq!(claim(&service, "key")["claimed"], true);
    }
}

#[test]
fn an_address_that_is_none_is_refused() {
    for listen in [
        "127.0.0.1",
        "8080",
        " ",
        "127.0.0.1:http",
        "127.0.0.1:65536",
    ] {
        let database = Database::new(Backend::Sqlite);
        let line = refusal(&run(&database, &[], &[("LISTEN", listen)]));
        assert!(line.contains("LISTEN"), "{line}");
    }
}

#[test]
fn api_keys_that_are_none_are_refused_without_their_secrets() {
    for keys in [
        SECRET.to_owned(),
        format!(":{SECRET}"),
        format!("n8n:{SECRET},"),
        format!("n8n:{SECRET},shop:"),
        format!("n8n:{SECRET} {SECRET}"),
        format!("n8n:{SECRET}\u{e9}"),
        format!("n8n:{SECRET},shop:{SECRET}"),
        format!("n\u{e9}:{SECRET}"),
        format!("{SECRET} n8n:{SECRET}"),
    ] {
        let database = Database::new(Backend::Sqlite);
        let line = refusal(&run(&database, &[], &[("API_KEYS", &keys)]));
        assert!(line.contains("API_KEYS"), "{line}");
        assert!(!line.contains(SECRET), "{line}");
    }
}

#[test]
fn a_port_in_use_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = listener.local_addr().unwrap().to_string();
    let database = Database::new(Backend::Sqlite);
    let line = refusal(&run(&database, &[], &[("LISTEN", &listen)]));
    assert!(line.contains("LISTEN"), "{line}");
    assert!(line.contains(&listen), "{line}");
}

// Starting together with the database, and with others.

#[test]
fn a_database_that_appears_meanwhile_is_used() {
    let url = SHARED.url("late");
    let mut process = command(&at(&url), &[], &[("DATABASE_WAIT", "60")])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = BufReader::new(process.stderr.take().unwrap()).lines();
    let mut says = |what: &str| log.any(|line| line.unwrap().contains(what));
    assert!(says("waiting for the database"));
    SHARED.create("late");
    assert!(says("listening on"));
    process.kill().unwrap();
    process.wait().unwrap();
    assert_eq!(
        psql(&url, "SELECT count(*) FROM processed_orders").unwrap(),
        "0"
    );
}

#[test]
fn replicas_that_start_at_once_on_an_empty_database_all_come_up() {
    let database = Arc::new(Database::new(Backend::Postgres));
    let services: Vec<Service> = std::thread::scope(|threads| {
        let starts: Vec<_> = (0..6)
            .map(|_| threads.spawn(|| Service::start_beside(Arc::clone(&database), &[])))
            .collect();
        starts
            .into_iter()
            .map(|start| start.join().unwrap())
            .collect()
    });
    let won: Vec<bool> = services
        .iter()
        .map(|service| service.claim(json!({"idempotency_key": "key"}))["claimed"] == true)
        .collect();
    assert_eq!(won, [true, false, false, false, false, false]);
}

// The end.

#[test]
fn sigterm_and_sigint_end_it_well() {
    for signal in ["TERM", "INT"] {
        let mut service = Service::start(Backend::Sqlite);
        // A connection that is kept alive does not hold it up for ever.
        assert_eq!(claim(&service, "key")["claimed"], true);
        service.signal(signal);
        assert_eq!(service.wait().code(), Some(0));
    }
}

/// psql that is kept open.
struct Session {
    process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Session {
    fn open(url: &str) -> Self {
        let mut process = Command::new("psql")
            .args(["-XqAt", url])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap()).lines();
        Self {
            process,
            input,
            output,
        }
    }

    /// Runs a statement, and gives its first value.
    fn run(&mut self, sql: &str) -> String {
        writeln!(self.input, "{sql};\n\\echo end").unwrap();
        let lines = self.output.by_ref().map(Result::unwrap);
        let lines: Vec<String> = lines.take_while(|line| line != "end").collect();
        lines.into_iter().next().unwrap_or_default()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn sigterm_finishes_what_is_in_flight_and_takes_nothing_new() {
    let mut service = Service::start(Backend::Postgres);
    assert_eq!(claim(&service, "key")["claimed"], true);
    let mut holder = Session::open(&service.database.url);
    holder.run("BEGIN");
    holder.run("SELECT 1 FROM processed_orders WHERE idempotency_key = 'key' FOR UPDATE");
    let client = service.client();
    let in_flight = std::thread::spawn(move || {
        client.post(
            "/claim",
            &json!({"idempotency_key": "key", "claimant": "b"}),
        )
    });
    wait_until("the claim waits for the row", || {
        let waiting = "SELECT count(*) FROM pg_locks \
            WHERE NOT granted AND transactionid::text = pg_current_xact_id()::text";
        holder.run(waiting) == "1"
    });
    service.signal("TERM");
    wait_until("new connections are refused", || {
        TcpStream::connect(address(&service)).is_err()
    });
    holder.run("COMMIT");
    let verdict = in_flight.join().unwrap().ok();
    assert_eq!(verdict["claimed"], false);
    assert_eq!(verdict["seen_again"], 1);
    assert_eq!(service.wait().code(), Some(0));
}

// TLS.

fn openssl(folder: &TempDir, arguments: &str) {
    let output = Command::new("openssl")
        .args(arguments.split_whitespace())
        .current_dir(folder)
        .output()
        .expect("openssl is needed: scripts/test installs it");
    assert!(output.status.success(), "{arguments}: {output:?}");
}

/// Makes a certificate authority `NAME.crt`.
fn make_authority(folder: &TempDir, name: &str) {
    openssl(
        folder,
        &format!(
            "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 \
             -subj /CN={name} -keyout {name}.key -out {name}.crt"
        ),
    );
}

/// Makes a certificate for `localhost`, which the authority `ca` signs, and makes it readable
/// for a server that is nobody special.
fn make_certificate(folder: &TempDir) {
    openssl(
        folder,
        "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=localhost \
         -keyout server.key -out server.csr",
    );
    std::fs::write(folder.path().join("names"), "subjectAltName=DNS:localhost").unwrap();
    openssl(
        folder,
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 \
         -extfile names -out server.crt",
    );
    let own = std::os::unix::fs::MetadataExt::uid(&std::fs::metadata(folder).unwrap());
    let owner = if own == 0 { "postgres" } else { "" };
    let script = format!("chmod 755 . && chmod 600 server.key && chown {owner}: server.key");
    let made = Command::new("sh")
        .args(["-c", &script])
        .current_dir(folder)
        .status();
    assert!(made.unwrap().success());
}

#[test]
fn tls_to_postgres_is_as_libpq_does_it() {
    let folder = tempfile::tempdir().unwrap();
    make_authority(&folder, "ca");
    make_authority(&folder, "other");
    make_certificate(&folder);
    let file = |name: &str| folder.path().join(name).display().to_string();
    let postgres = Postgres::start(&[
        "ssl=on",
        &format!("ssl_cert_file={}", file("server.crt")),
        &format!("ssl_key_file={}", file("server.key")),
    ]);
    let by_address = postgres.create("gate");
    let by_name = by_address.replace("127.0.0.1", "localhost");
    let verified = |url: &str, root: &str| {
        at(format!(
            "{url}?sslmode=verify-full&sslrootcert={}",
            file(root)
        ))
    };
    for database in [
        at(format!("{by_address}?sslmode=require")),
        verified(&by_name, "ca.crt"),
    ] {
        let service = Service::start_on(database, &[]);
        assert!(claim(&service, "key")["claimed"].is_boolean());
        let encrypted = "SELECT bool_and(ssl) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
            WHERE application_name = 'dedup-gate'";
        assert_eq!(postgres.try_sql("gate", encrypted).unwrap(), "t");
    }
    for database in [
        verified(&by_name, "other.crt"),
        verified(&by_address, "ca.crt"),
    ] {
        let line = refusal(&run(&database, &[], &[]));
        assert!(line.contains("certificate"), "{line}");
    }
}

#[test]
fn tls_that_is_required_is_not_given_up() {
    let database = Database::new(Backend::Postgres);
    let line = refusal(&run(
        &at(format!("{}?sslmode=require", database.url)),
        &[],
        &[],
    ));
    assert!(line.contains("does not support SSL"), "{line}");
}

// Durability, and secrets.

#[test]
fn synchronous_commit_is_raised_where_it_is_off() {
    let database = Database::new(Backend::Postgres);
    let (_, name) = database.url.rsplit_once('/').unwrap();
    database.sql(&format!(
        "ALTER DATABASE {name} SET synchronous_commit = off"
    ));
    assert_eq!(database.sql("SHOW synchronous_commit"), "off");
    let service = Service::start_on(database, &[]);
    service.database.sql(
        "CREATE TABLE written (what text, synchronous_commit text); \
         CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
             INSERT INTO written VALUES (TG_TABLE_NAME || ' ' || lower(TG_OP), \
                 current_setting('synchronous_commit')); \
             RETURN NULL; END $$; \
         CREATE TRIGGER note AFTER INSERT OR UPDATE ON processed_orders \
             FOR EACH ROW EXECUTE FUNCTION note(); \
         CREATE TRIGGER note AFTER INSERT OR UPDATE ON run_ledger \
             FOR EACH ROW EXECUTE FUNCTION note()",
    );
    for claimant in ["a", "b"] {
        service.claim(json!({"idempotency_key": "key", "claimant": claimant}));
    }
    service.pending_key("pending", "a", 600);
    service
        .done(json!({"idempotency_key": "pending", "attempt": 1}))
        .ok();
    let written = "SELECT DISTINCT what, synchronous_commit FROM written ORDER BY 1";
    assert_eq!(
        service.database.sql(written),
        "processed_orders insert|on\nprocessed_orders update|on\n\
         run_ledger insert|on\nrun_ledger update|on"
    );
}

#[test]
fn no_secret_is_in_the_log_however_much_is_logged() {
    let database = Database::new(Backend::Postgres);
    let url = database
        .url
        .replace("postgres@", &format!("postgres:{SECRET}-url@"));
    let keys = format!("n8n:{SECRET}-key");
    let settings = [("RUST_LOG", "trace"), ("API_KEYS", &keys)];
    let mut service = Service::start_on(at(url), &settings);
    let body = json!({"idempotency_key": "key", "claimant": "a"});
    let right = format!("{SECRET}-key");
    service.post_as(&right, "/claim", &body).ok();
    service
        .post_as(&format!("{SECRET}-guess"), "/claim", &body)
        .problem(401);
    let bearer = [("Authorization", format!("Bearer {right}"))];
    let bearer = bearer
        .each_ref()
        .map(|(name, value)| (*name, value.as_str()));
    assert_eq!(service.send("GET", "/ledger", &bearer, b"").status, 200);
    let (_, name) = database.url.rsplit_once('/').unwrap();
    let end = format!(
        "ALTER DATABASE {name} ALLOW_CONNECTIONS false; \
         SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"
    );
    SHARED.try_sql("postgres", &end).unwrap();
    service.post_as(&right, "/claim", &body).problem(503);
    service.signal("TERM");
    service.wait();
    let log = service.log();
    assert!(log.contains("TRACE"), "{log}");
    assert!(!log.contains(SECRET), "{log}");
}

#[test]
fn a_setting_that_is_out_of_bounds_is_refused_by_name() {
    for (name, value) in [
        ("REPLAY_WINDOW", "0"),
        ("BODY_LIMIT", "1"),
        ("DATABASE_WAIT", "soon"),
        ("DATABASE_CONNECTIONS", "0"),
        ("RETRY_WAITS", "1,,5"),
        ("RETRY_AFTER_LIMIT", "-1"),
        ("OUTBOX_TIMEOUT", "0"),
        ("OUTBOX_RETRY_WAITS", "5,"),
    ] {
        let database = Database::new(Backend::Sqlite);
        let output = finish(&mut command(&database, &[], &[(name, value)]));
        assert!(!output.status.success());
        let text = String::from_utf8(output.stderr).unwrap();
        let flag = name.to_lowercase().replace('_', "-");
        assert!(text.contains(&format!("--{flag}")), "{text}");
    }
}

#[test]
fn an_outbox_that_cannot_be_is_refused_without_its_secrets() {
    let metadata = format!("*=http://{SECRET}@169.254.169.254/{SECRET}");
    for (name, value) in [
        ("OUTBOX_ROUTES", metadata.clone()),
        ("OUTBOX_ROUTES", format!("mail=ftp://a.example/{SECRET}")),
        ("OUTBOX_ROUTES", format!("http://a.example/{SECRET}")),
        ("OUTBOX_ROUTES", format!("mail=http://a.example/{SECRET},")),
        ("OUTBOX_SECRETS", SECRET.to_owned()),
        ("OUTBOX_SECRETS", format!("whsec_{SECRET}")),
        ("OUTBOX_ALLOWED_HOSTS", "http://a.example/".to_owned()),
    ] {
        let database = Database::new(Backend::Sqlite);
        let line = refusal(&run(&database, &[], &[(name, &value)]));
        assert!(
            line.starts_with(&format!("dedup-gate: {name}: entry ")),
            "{line}"
        );
        assert!(!line.contains(SECRET), "{line}");
    }
    let named = [
        ("OUTBOX_ROUTES", metadata.as_str()),
        ("OUTBOX_ALLOWED_HOSTS", "169.254.169.254"),
    ];
    let service = Service::start_on(Database::new(Backend::Sqlite), &named);
    assert_eq!(claim(&service, "key")["claimed"], true);
}

#[test]
fn a_database_that_cannot_hold_every_text_is_refused() {
    let created =
        "CREATE DATABASE latin1 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0";
    SHARED.try_sql("postgres", created).unwrap();
    let line = refusal(&run(&at(SHARED.url("latin1")), &[], &[]));
    assert!(line.contains("LATIN1") && line.contains("UTF8"), "{line}");
}

/// It may be a server that is being promoted: it is waited for as one that is away is.
#[test]
fn a_read_only_server_is_waited_for() {
    let database = Database::new(Backend::Postgres);
    let name = database.url.rsplit_once('/').unwrap().1;
    let read_only = |value: &str| {
        let set = format!("ALTER DATABASE {name} SET default_transaction_read_only = {value}");
        SHARED.try_sql("postgres", &set).unwrap();
    };
    read_only("on");
    let line = refusal(&run(&database, &[], &[]));
    assert!(line.contains("read-only"), "{line}");
    read_only("off");
    let service = Service::start_on(database, &[]);
    assert_eq!(claim(&service, "key")["claimed"], true);
}

/// An administrator migrates; the service's own role may do nothing but use the tables.
#[test]
fn a_role_that_may_not_make_tables_serves_what_is_migrated() {
    let database = Database::new(Backend::Postgres);
    assert!(run(&database, &["migrate"], &[]).status.success());
    let _ = SHARED.try_sql("postgres", "CREATE ROLE clerk LOGIN");
    database.sql(
        "REVOKE CREATE ON SCHEMA public FROM public; \
         GRANT SELECT, INSERT, UPDATE ON ALL TABLES IN SCHEMA public TO clerk",
    );
    let as_clerk = at(database.url.replace("postgres@", "clerk@"));
    let service = Service::start_on(as_clerk, &[]);
    assert_eq!(claim(&service, "key")["claimed"], true);
    assert_eq!(service.get("/health/ready").status, 200);
}

/// The first start changes a table that raw SQL uses: whoever holds it is not waited for long.
#[test]
fn a_table_in_use_does_not_hang_the_start() {
    let database = Database::new(Backend::Postgres);
    database.sql(
        "CREATE TABLE processed_orders (idempotency_key TEXT PRIMARY KEY, order_id TEXT NOT NULL, \
             processed_at TIMESTAMPTZ NOT NULL DEFAULT now())",
    );
    let mut holder = Command::new("psql")
        .args(["-Xq", &database.url])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = holder.stdin.take().unwrap();
    writeln!(
        input,
        "BEGIN; LOCK TABLE processed_orders IN ROW EXCLUSIVE MODE;\n\\echo held"
    )
    .unwrap();
    let mut said = BufReader::new(holder.stdout.take().unwrap()).lines();
    assert_eq!(said.next().unwrap().unwrap(), "held");
    let line = refusal(&run(&database, &[], &[]));
    assert!(line.contains("out of reach"), "{line}");
    drop(input);
    holder.wait().unwrap();
    let service = Service::start_on(database, &[]);
    assert_eq!(claim(&service, "key")["claimed"], true);
}
