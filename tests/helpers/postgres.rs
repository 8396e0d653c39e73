//! A real Postgres server on a free port, in a folder of its own.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;

use super::wait_until;

/// The server that tests share which only need a database.
pub(crate) static SHARED: LazyLock<Postgres> = LazyLock::new(|| Postgres::start(&[]));

/// A Postgres server. It ends with the test's process, however that ends.
pub(crate) struct Postgres {
    folder: PathBuf,
    port: u16,
    settings: Vec<String>,
    /// A shell that waits for its input to close, then ends the server and removes the folder.
    warden: Child,
}

/// The folder of `initdb` and `postgres`, as Debian and most others lay them.
fn programs() -> PathBuf {
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

/// A command that runs as nobody special: Postgres refuses to run as root.
fn unprivileged(program: &Path) -> Command {
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
        let data = folder.join("data");
        std::fs::create_dir(&data).unwrap();
        run(Command::new("chmod").arg("755").arg(&folder));
        if std::os::unix::fs::MetadataExt::uid(&std::fs::metadata("/proc/self").unwrap()) == 0 {
            run(Command::new("chown")
                .arg("-R")
                .arg("postgres:")
                .arg(&folder));
        }
        run(unprivileged(&programs().join("initdb"))
            .args([
                "--auth=trust",
                "--username=postgres",
                "--encoding=UTF8",
                "--no-locale",
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
        let warden = Self::guarded(&folder, &settings);
        let server = Self {
            folder,
            port,
            settings,
            warden,
        };
        server.wait_until_up();
        server
    }

    /// Starts the server in a shell that ends it when this process ends.
    fn guarded(folder: &Path, settings: &[String]) -> Child {
        let mut command = unprivileged(Path::new("sh"));
        command
            .arg("-c")
            .arg(
                "folder=$1; shift; \"$@\" >>\"$folder/log\" 2>&1 & server=$!; \
                 read -r what; [ \"$what\" = keep ] && exit; \
                 kill -QUIT $server; wait $server; rm -rf \"$folder\"",
            )
            .arg("warden")
            .arg(folder)
            .arg(programs().join("postgres"))
            .arg("-D")
            .arg(folder.join("data"));
        for setting in settings {
            command.arg("-c").arg(setting);
        }
        command.stdin(Stdio::piped()).spawn().unwrap()
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

    /// The URL of a database.
    pub(crate) fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
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

    /// Sends the server a signal: `STOP` and `CONT` to halt it, `QUIT` for an immediate
    /// shutdown, `KILL` for the worst. The last two are followed by [`Self::restart`].
    pub(crate) fn signal(&self, name: &str) {
        run(Command::new("kill").arg(format!("-{name}")).arg(self.pid()));
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

    /// Starts the server again after it was ended.
    pub(crate) fn restart(&mut self) {
        self.warden.wait_with_keep();
        // Backends of a killed server keep its shared memory for a moment: it refuses until then.
        wait_until("Postgres starts again", || {
            let mut warden = Self::guarded(&self.folder, &self.settings);
            loop {
                if self.try_sql("postgres", "SELECT 1").is_ok() {
                    self.warden = warden;
                    return true;
                }
                if std::fs::read_to_string(self.data().join("postmaster.pid")).is_err() {
                    warden.wait_with_keep();
                    return false;
                }
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
        });
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        drop(self.warden.stdin.take());
        let _ = self.warden.wait();
    }
}

trait Warden {
    fn wait_with_keep(&mut self);
}

impl Warden for Child {
    /// Ends the shell, and leaves folder and server as they are.
    fn wait_with_keep(&mut self) {
        use std::io::Write;
        if let Some(mut input) = self.stdin.take() {
            let _ = input.write_all(b"keep\n");
        }
        let _ = self.wait();
    }
}

/// Runs SQL in psql; rows are lines, and columns are separated by `|`.
pub(crate) fn psql(url: &str, sql: &str) -> Result<String, String> {
    let output = Command::new("psql")
        .args(["-XqAt", "-v", "ON_ERROR_STOP=1", url, "-c", sql])
        .output()
        .expect("psql is needed: scripts/test installs it");
    if output.status.success() {
        Ok(String::from_utf8(output.stdout)
            .unwrap()
            .trim_end()
            .to_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}
