//! A real Postgres server on a free port, in a folder of its own.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

use super::wait_until;

/// The server that tests share which only need a database. None of them cuts its power.
pub(crate) static SHARED: LazyLock<Postgres> = LazyLock::new(|| Postgres::start(&["fsync=off"]));

/// A Postgres server. It ends with the test's process, however that ends.
pub(crate) struct Postgres {
    folder: PathBuf,
    port: u16,
    /// A shell that waits for its input to close, then ends the server and removes the folder.
    warden: Child,
}

/// The folder of `initdb` and `postgres`: `POSTGRES_BIN`, or as Debian and most others lay them.
fn programs() -> PathBuf {
    if let Some(folder) = std::env::var_os("POSTGRES_BIN") {
        return folder.into();
    }
    let mut candidates: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten()
        .map(|version| version.path().join("bin"))
        .filter(|folder| folder.join("initdb").exists())
        .collect();
    candidates.sort();
    candidates.pop().unwrap_or_else(|| {
        let output = Command::new("pg_config").arg("--bindir").output();
        let output = output.expect("Postgres is needed: scripts/test installs it");
        PathBuf::from(String::from_utf8(output.stdout).unwrap().trim())
    })
}

/// The folder of `bin`, `lib` and `share` of the newest Postgres that `scripts/test` has found, copied to
/// where those who run it may read it; none where it comes for other processors only.
fn newest(folder: &Path) -> Option<PathBuf> {
    let cached = std::env::var_os("NEWEST_POSTGRES");
    assert!(
        cached.is_some() || !cfg!(target_arch = "x86_64"),
        "scripts/test finds it"
    );
    let copy = folder.join("newest");
    run(Command::new("cp").arg("-a").arg(cached?).arg(&copy));
    Some(copy.join("bin"))
}

/// A command that runs as nobody special: Postgres refuses to run as root.
pub(super) fn unprivileged(program: &Path) -> Command {
    let is_root = std::fs::metadata("/proc/self")
        .is_ok_and(|own| std::os::unix::fs::MetadataExt::uid(&own) == 0);
    if !is_root {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command
        .args(["--reuid=postgres", "--regid=postgres", "--clear-groups"])
        .arg(program);
    command
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{command:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A port that nobody listens on.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

impl Postgres {
    /// Starts a server with these settings (`name=value`).
    pub(crate) fn start(settings: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap().keep();
        Self::start_in(folder, &programs(), settings)
    }

    /// Starts a server of the newest version that there is.
    pub(crate) fn start_newest() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap().keep();
        let programs = newest(&folder)?;
        Some(Self::start_in(folder, &programs, &["fsync=off"]))
    }

    fn start_in(folder: PathBuf, programs: &Path, settings: &[&str]) -> Self {
        let data = folder.join("data");
        std::fs::create_dir(&data).unwrap();
        run(Command::new("chmod").arg("755").arg(&folder));
        if std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap()) == 0 {
            run(Command::new("chown")
                .arg("-R")
                .arg("postgres:")
                .arg(&folder));
        }
        run(unprivileged(&programs.join("initdb"))
            .args([
                "--auth=trust",
                "--username=postgres",
                "--encoding=UTF8",
                "--no-locale",
                // Processes are killed here, and the machine never: its cache keeps what is written.
                "--no-sync",
            ])
            .arg("-D")
            .arg(&data));
        let port = free_port();
        let settings: Vec<String> = [
            "listen_addresses=127.0.0.1".to_owned(),
            format!("port={port}"),
            format!("unix_socket_directories={}", folder.display()),
            "max_connections=300".to_owned(),
        ]
        .into_iter()
        .chain(settings.iter().map(|setting| (*setting).to_owned()))
        .collect();
        let warden = Self::guarded(&folder, programs, &settings);
        let server = Self {
            folder,
            port,
            warden,
        };
        server.wait_until_up();
        server
    }

    /// Starts a shell that keeps the server running for as long as this process lives, unless
    /// there is a file `down`. It starts a killed server again until the memory that its
    /// backends shared is free.
    fn guarded(folder: &Path, programs: &Path, settings: &[String]) -> Child {
        const WARDEN: &str = r#"
            folder=$1; shift
            while [ -d "$folder/data" ]; do
                if [ -e "$folder/down" ]; then sleep 0.05; else "$@" >>"$folder/log" 2>&1; fi
            done &
            read -r _
            touch "$folder/down"
            server=$(head -n 1 "$folder/data/postmaster.pid") && kill -CONT "$server" && kill -QUIT "$server"
            while kill -0 "$server"; do sleep 0.05; done
            rm -rf "$folder"
            wait"#;
        let mut command = unprivileged(Path::new("sh"));
        command
            .args(["-c", WARDEN, "warden"])
            .arg(folder)
            .arg(programs.join("postgres"))
            .arg("-D")
            .arg(folder.join("data"));
        for setting in settings {
            command.arg("-c").arg(setting);
        }
        command
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn wait_until_up(&self) {
        wait_until("Postgres is up", || {
            self.try_sql("postgres", "SELECT 1").is_ok()
        });
    }

    /// Where the server keeps its files.
    pub(crate) fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    /// The port of the server on 127.0.0.1.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    /// The URL of a database.
    pub(crate) fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port())
    }

    /// Makes a database, and gives its URL.
    pub(crate) fn create(&self, database: &str) -> String {
        self.try_sql("postgres", &format!("CREATE DATABASE {database}"))
            .unwrap();
        self.url(database)
    }

    /// Runs SQL in psql; rows are lines, and columns are separated by `|`.
    pub(crate) fn try_sql(&self, database: &str, sql: &str) -> Result<String, String> {
        psql(&self.url(database), sql)
    }

    /// The server's process.
    fn pid(&self) -> String {
        let file = std::fs::read_to_string(self.data().join("postmaster.pid")).unwrap();
        file.lines().next().unwrap().to_owned()
    }

    /// Ends the server by a signal: `INT` for a fast shutdown, `QUIT` for an immediate one,
    /// `KILL` for the worst.
    pub(crate) fn end(&self, signal: &str) {
        std::fs::write(self.folder.join("down"), "").unwrap();
        run(Command::new("kill")
            .arg(format!("-{signal}"))
            .arg(self.pid()));
        wait_until("Postgres is down", || {
            self.try_sql("postgres", "SELECT 1").is_err()
        });
    }

    /// Starts the server again after [`Self::end`].
    pub(crate) fn start_again(&self) {
        std::fs::remove_file(self.folder.join("down")).unwrap();
        self.wait_until_up();
    }

    /// Halts (`STOP`) or wakes (`CONT`) the server with all its processes.
    pub(crate) fn signal_all(&self, name: &str) {
        let pid = self.pid();
        let children = Command::new("pgrep").args(["-P", &pid]).output().unwrap();
        let children = String::from_utf8(children.stdout).unwrap();
        for process in children.split_whitespace().chain([pid.as_str()]) {
            // A backend may have ended meanwhile.
            let _ = Command::new("kill")
                .arg(format!("-{name}"))
                .arg(process)
                .output();
        }
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        drop(self.warden.stdin.take());
        let _ = self.warden.wait();
    }
}

/// Runs SQL in psql; rows are lines, and columns are separated by `|`.
pub(crate) fn psql(url: &str, sql: &str) -> Result<String, String> {
    said_by(Command::new("psql").args(["-XqAt", "-v", "ON_ERROR_STOP=1", url, "-c", sql]))
}

/// What a program writes, or what it complains of where it fails.
pub(crate) fn said_by(command: &mut Command) -> Result<String, String> {
    let output = command.output();
    let output =
        output.unwrap_or_else(|error| panic!("scripts/test installs it: {command:?}: {error}"));
    if output.status.success() {
        Ok(String::from_utf8(output.stdout)
            .unwrap()
            .trim_end()
            .to_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}
