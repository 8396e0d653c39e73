//! `deploy/self-hosted-ai-starter-kit`: the file merged with the kit's, and the commands of the
//! merged one, run one after the other as Compose would.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;

use super::helpers::postgres::{Postgres, free_port, said_by};
use super::helpers::{Backend, Database, Service, wait_until};
use super::instance::Instance;
use super::stage::{files_in, localised, order, stage};

const PROJECT: &str = env!("CARGO_MANIFEST_DIR");
/// What is merged with the kit's own file.
const OVERRIDE: &str = "deploy/self-hosted-ai-starter-kit/docker-compose.override.yml";
/// Where the image has what n8n imports.
const SHARE: &str = "/usr/share/dedup-gate";

/// Whatever a URL, a shell, JSON or Compose might take for its own.
const PASSWORD: &str = r#"a@b/c:d%2Fe#f?g&h $i"j\k=l{m}"#;
const API_KEY: &str = r#"a"b\c$d{e}:f#g&h<i`j%2F"#;
const NEXT_API_KEY: &str = "another-key";

/// The kit's folder, with ours copied into it.
struct Kit {
    folder: TempDir,
}

/// What a program makes of the merged file.
struct Config(Value);

impl Kit {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let copied = said_by(
            Command::new("cp")
                .arg("-R")
                .args(["tests/n8n/kit/.", OVERRIDE])
                .arg(folder.path())
                .current_dir(PROJECT),
        );
        copied.unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Merges the files, with these lines in the kit's `.env`.
    fn try_config(&self, env: &[(&str, &str)]) -> Result<Config, String> {
        // Compose writes YAML, and `$$` for each `$`.
        const TO_JSON: &str =
            "import json, sys, yaml; json.dump(yaml.safe_load(sys.stdin), sys.stdout)";
        let lines: String = env
            .iter()
            .map(|(name, value)| format!("{name}='{value}'\n"))
            .collect();
        std::fs::write(self.path(".env"), lines).unwrap();
        let yaml = said_by(
            Command::new("docker-compose")
                .arg("config")
                .current_dir(self.folder.path())
                .env_clear()
                .env("PATH", std::env::var_os("PATH").unwrap()),
        )?;
        std::fs::write(self.path("merged.yml"), yaml).unwrap();
        let merged = std::fs::File::open(self.path("merged.yml")).unwrap();
        let json = said_by(
            Command::new("/usr/bin/python3")
                .args(["-c", TO_JSON])
                .stdin(merged),
        )?;
        Ok(Config(
            serde_json::from_str(&json.replace("$$", "$")).unwrap(),
        ))
    }

    fn config(&self, api_key: &str, more: &[(&str, &str)]) -> Config {
        let env = [
            ("POSTGRES_USER", "root"),
            ("POSTGRES_PASSWORD", PASSWORD),
            ("POSTGRES_DB", "n8n"),
            ("N8N_ENCRYPTION_KEY", "super-secret"),
            ("DEDUP_GATE_API_KEY", api_key),
        ];
        self.try_config(&[&env, more].concat()).unwrap()
    }

    /// Lays out what the Dockerfile copies for n8n, as the image has it.
    fn make_image(&self) {
        let dockerfile = std::fs::read_to_string(format!("{PROJECT}/Dockerfile")).unwrap();
        let share = self.path("image");
        std::fs::create_dir(&share).unwrap();
        for line in dockerfile.lines().filter(|line| line.contains(SHARE)) {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!((words[0], words.len()), ("COPY", 3), "{line}");
            let to = words[2].replace(SHARE, &share.display().to_string());
            let source = Path::new(PROJECT).join(words[1]);
            said_by(Command::new("cp").arg("-R").arg(source).arg(to)).unwrap();
        }
    }

    /// Runs a service's command by `env`, with the service's variables beside those it has got
    /// already. What the service mounts is found in the kit's folder.
    fn run(&self, config: &Config, service: &str, mut env: Command) -> Output {
        let mut mounts = vec![(SHARE.to_owned(), self.path("image"))];
        for (source, target) in config.mounts(service) {
            // A path of the host, or a volume.
            let source = self.path(&source);
            std::fs::create_dir_all(&source).unwrap();
            mounts.push((target, source));
        }
        for (name, value) in config.environment(service) {
            if env.get_envs().all(|(known, _)| known != name.as_str()) {
                env.env(name, value);
            }
        }
        env.args(config.words(service).into_iter().map(|word| {
            mounts.iter().fold(word, |word, (target, source)| {
                word.replace(target, &source.display().to_string())
            })
        }));
        env.output().unwrap()
    }

    /// What happens to n8n's data at `docker compose up`, and what is complained of.
    fn up(&self, config: &Config, n8n: &Instance) -> String {
        let run = |service| {
            let output = self.run(config, service, n8n.command("env"));
            let complaint = String::from_utf8(output.stderr).unwrap();
            assert!(output.status.success(), "{service}: {complaint}");
            complaint
        };
        run("dedup-gate-workflows") + &run("n8n-import")
    }
}

impl Config {
    fn service(&self, name: &str) -> &Value {
        &self.0["services"][name]
    }

    fn services(&self) -> Vec<&str> {
        let services = self.0["services"].as_object().unwrap();
        services.keys().map(String::as_str).collect()
    }

    /// The entrypoint and the command.
    fn words(&self, service: &str) -> Vec<String> {
        ["entrypoint", "command"]
            .iter()
            .flat_map(|part| self.service(service)[part].as_array().unwrap())
            .map(|word| word.as_str().unwrap().to_owned())
            .collect()
    }

    fn environment(&self, service: &str) -> BTreeMap<String, String> {
        serde_json::from_value(self.service(service)["environment"].clone()).unwrap_or_default()
    }

    /// Source and target of each mount. Compose 1 writes `source:target:mode`, Compose 2 an object.
    fn mounts(&self, service: &str) -> Vec<(String, String)> {
        let mounts = self.service(service)["volumes"].as_array();
        let source_and_target = |mount: &Value| match mount.as_str() {
            Some(text) => {
                let parts: Vec<&str> = text.split(':').collect();
                (parts[0].to_owned(), parts[1].to_owned())
            }
            None => {
                let part = |name: &str| mount[name].as_str().unwrap().to_owned();
                (part("source"), part("target"))
            }
        };
        mounts
            .into_iter()
            .flatten()
            .map(source_and_target)
            .collect()
    }

    /// What a service waits for.
    fn waits_for(&self, service: &str) -> Vec<(&str, &str)> {
        let waits = self.service(service)["depends_on"].as_object().unwrap();
        waits
            .iter()
            .map(|(other, wait)| (other.as_str(), wait["condition"].as_str().unwrap()))
            .collect()
    }
}

#[test]
fn the_files_merge_into_services_that_wait_for_each_other() {
    let kit = Kit::new();
    let ours = kit.path("docker-compose.override.yml");
    std::fs::rename(&ours, kit.path("aside")).unwrap();
    let without = kit.config(API_KEY, &[]);
    std::fs::rename(kit.path("aside"), &ours).unwrap();
    let config = kit.config(API_KEY, &[]);

    let ours = ["dedup-gate", "dedup-gate-database", "dedup-gate-workflows"];
    let mut services = without.services();
    services.extend(ours);
    services.sort_unstable();
    let mut found = config.services();
    found.sort_unstable();
    assert_eq!(found, services);

    let (healthy, completed) = ("service_healthy", "service_completed_successfully");
    let database = [("dedup-gate-database", completed)];
    assert_eq!(config.waits_for("dedup-gate"), database);
    assert_eq!(
        config.waits_for("dedup-gate-database"),
        [("postgres", healthy)]
    );
    assert_eq!(
        config.waits_for("n8n-import"),
        [("dedup-gate-workflows", completed), ("postgres", healthy)]
    );
    assert_eq!(
        config.waits_for("n8n"),
        [("n8n-import", completed), ("postgres", healthy)]
    );

    let network = |service: &str| config.service(service)["networks"].clone();
    assert_eq!(network("dedup-gate"), network("n8n"));
    assert_eq!(network("dedup-gate-database"), network("postgres"));
    assert_eq!(config.service("dedup-gate")["restart"], "unless-stopped");
    for service in ours {
        assert!(config.service(service)["ports"].is_null(), "{service}");
        assert!(config.service(service)["profiles"].is_null(), "{service}");
    }

    // The kit's services are what they were, and n8n-import runs what it ran.
    for service in without.services() {
        for part in ["image", "command", "ports", "restart", "healthcheck"] {
            assert_eq!(
                config.service(service)[part],
                without.service(service)[part]
            );
        }
        let mounts = config.mounts(service);
        assert!(
            without
                .mounts(service)
                .iter()
                .all(|mount| mounts.contains(mount))
        );
    }
    let mut environment = without.environment("n8n-import");
    environment.insert("DEDUP_GATE_API_KEY".into(), API_KEY.into());
    assert_eq!(config.environment("n8n-import"), environment);
    let mut environment = without.environment("n8n");
    environment.insert("N8N_SSRF_ALLOWED_HOSTNAMES".into(), "dedup-gate,".into());
    assert_eq!(config.environment("n8n"), environment);
    let allowed = kit.config(API_KEY, &[("N8N_SSRF_ALLOWED_HOSTNAMES", "intranet")]);
    assert_eq!(
        allowed.environment("n8n")["N8N_SSRF_ALLOWED_HOSTNAMES"],
        "dedup-gate,intranet"
    );
}

#[test]
fn the_api_key_is_asked_for() {
    let kit = Kit::new();
    for env in [&[][..], &[("DEDUP_GATE_API_KEY", "")]] {
        let refusal = kit.try_config(env).err().unwrap();
        assert!(
            refusal.contains("add a line DEDUP_GATE_API_KEY=... to the file .env"),
            "{refusal}"
        );
    }
}

/// On a volume that was there before, as on a new one: it is made once, and used with whatever
/// password.
#[test]
fn the_database_is_made_once_with_any_password() {
    let kit = Kit::new();
    let config = kit.config(API_KEY, &[]);
    let postgres = Postgres::start(&["fsync=off"]);
    let sql = |sql: &str| postgres.try_sql("postgres", sql).unwrap();
    sql(&format!(
        "CREATE ROLE root SUPERUSER LOGIN PASSWORD '{PASSWORD}'"
    ));
    let rules = postgres.data().join("pg_hba.conf");
    let trusting = std::fs::read_to_string(&rules).unwrap();
    let asking = format!("host all root 127.0.0.1/32 scram-sha-256\n{trusting}");
    std::fs::write(&rules, asking).unwrap();
    sql("SELECT pg_reload_conf()");
    wait_until("Postgres asks for the password", || {
        sql("SELECT count(*) FROM pg_hba_file_rules WHERE auth_method = 'scram-sha-256'") == "1"
    });

    let port = postgres.port().to_string();
    let here = [("PGHOST", "127.0.0.1"), ("PGPORT", port.as_str())];
    let make = || {
        let mut env = Command::new("env");
        env.envs(here);
        let output = kit.run(&config, "dedup-gate-database", env);
        assert!(output.status.success(), "{output:?}");
        sql("SELECT oid FROM pg_database WHERE datname = 'dedup_gate'")
    };
    let made = make();
    assert_ne!(made, "");

    let environment = config.environment("dedup-gate");
    let mut settings: Vec<(&str, &str)> = environment
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    settings.extend(here);
    let claim = || {
        let database = Database::at(postgres.url("dedup_gate"));
        let gate = Service::start_on(database, &settings);
        let reply = gate.post_as(API_KEY, "/claim", &json!({"idempotency_key": "k"}));
        reply.ok()["claimed"].clone()
    };
    assert_eq!(claim(), true);
    assert_eq!(make(), made);
    assert_eq!(claim(), false);
}

/// Where the kit's own import fails, n8n does not start: as it would without ours.
#[test]
fn the_kits_own_import_may_fail() {
    let kit = Kit::new();
    kit.make_image();
    let mut config = kit.config(API_KEY, &[]);
    config.0["services"]["n8n-import"]["command"] = json!(["-c", "exit 3"]);
    kit.run(&config, "dedup-gate-workflows", Command::new("env"));
    let output = kit.run(&config, "n8n-import", Command::new("env"));
    assert_eq!(output.status.code(), Some(3), "{output:?}");
}

/// Before n8n's first start, with a workflow published and edited, and with another API key while
/// n8n runs.
#[test]
fn n8n_gets_the_credential_and_the_workflows() {
    let kit = Kit::new();
    kit.make_image();
    // Only for its turn, and its provider: two n8n at once are much for a small machine.
    let stage = stage();
    let (gate_port, provider) = (free_port(), &stage.provider);
    let folder = kit.path("image/n8n-workflows");
    let localise = |file: PathBuf| -> Value {
        let text = localised(&file, gate_port, provider.port);
        std::fs::write(file, &text).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let shipped: Vec<Value> = files_in(folder.to_str().unwrap())
        .into_iter()
        .map(localise)
        .collect();
    let mut n8n = Instance::new("kit");
    let workflows = |n8n: &Instance| {
        n8n.sql(r#"SELECT id || ' ' || name || ' ' || active FROM workflow_entity ORDER BY id COLLATE "C""#)
    };

    let config = kit.config(API_KEY, &[]);
    let complaint = kit.up(&config, &n8n);
    assert!(!complaint.contains("dedup-gate:"), "{complaint}");
    let mut expected: Vec<String> = shipped
        .iter()
        .map(|workflow| format!("{} {} false", workflow["id"], workflow["name"]).replace('"', ""))
        .collect();
    assert_eq!(expected.len(), 9);
    expected.push("kitDemoWorkflow1 The kit's demo false".into());
    assert_eq!(workflows(&n8n), expected.join("\n"));

    // Published and edited before n8n was ever started; and n8n says as little as it can.
    n8n.publish(&shipped[0]);
    n8n.sql("UPDATE workflow_entity SET name = 'edited' WHERE id = 'dedupGate0000001'");
    expected[0] = "dedupGate0000001 edited true".into();
    let quiet = [
        ("N8N_LOG_LEVEL", "error"),
        ("N8N_LOG_FORMAT", "json"),
        ("N8N_LOG_OUTPUT", "file"),
        ("N8N_LOG_SCOPES", "license"),
    ];
    let complaint = kit.up(&kit.config(API_KEY, &quiet), &n8n);
    assert!(!complaint.contains("dedup-gate:"), "{complaint}");
    assert_eq!(workflows(&n8n), expected.join("\n"));

    let database = Arc::new(Database::new(Backend::Postgres));
    let gate = |config: &Config| {
        let listen = format!("127.0.0.1:{gate_port}");
        let api_keys = &config.environment("dedup-gate")["API_KEYS"];
        let settings = [("LISTEN", listen.as_str()), ("API_KEYS", api_keys)];
        Service::start_beside(Arc::clone(&database), &settings)
    };
    let service = gate(&config);
    n8n.start();
    n8n.fire("dedup-gate", &order("kit-1")).ok();
    assert_eq!(provider.charges_of("kit-1").len(), 1);

    // Another key. What else goes wrong is told, and does not keep n8n from starting.
    drop(service);
    let config = kit.config(NEXT_API_KEY, &[]);
    let _service = gate(&config);
    std::fs::write(folder.join("broken.json"), "{").unwrap();
    let complaint = kit.up(&config, &n8n);
    assert!(complaint.contains("dedup-gate: its"), "{complaint}");
    n8n.fire("dedup-gate", &order("kit-2")).ok();
    let again = n8n.fire("dedup-gate", &order("kit-1")).ok();
    assert_eq!(again["status"], "already processed");
    assert_eq!(workflows(&n8n), expected.join("\n"));
}
