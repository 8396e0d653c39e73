//! A real PgBouncer in front of a Postgres server.

use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::postgres::{Postgres, free_port, unprivileged};
use super::wait_until;

/// A pooler. It ends with the test's process, however that ends.
pub(crate) struct PgBouncer {
    folder: TempDir,
    port: u16,
    /// A shell that waits for its input to close, and then ends the pooler.
    warden: Child,
}

impl PgBouncer {
    /// A pooler that gives at most `sessions` sessions of the server to all clients together.
    pub(crate) fn start(server: &Postgres, mode: &str, sessions: u32, settings: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={} user=postgres\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = any\npool_mode = {mode}\ndefault_pool_size = {sessions}\n\
             max_client_conn = 500\n{settings}\n",
            server.port()
        );
        let file = folder.path().join("pgbouncer.ini");
        std::fs::write(&file, text).unwrap();
        let readable = Command::new("chmod")
            .args(["-R", "a+rX"])
            .arg(folder.path())
            .status();
        assert!(readable.unwrap().success());
        let warden = Self::guarded(&file);
        let pooler = Self {
            folder,
            port,
            warden,
        };
        pooler.wait_until_up();
        pooler
    }

    fn guarded(file: &Path) -> Child {
        // Debian keeps it where only root looks.
        const WARDEN: &str = r#"
            PATH=$PATH:/usr/sbin
            pgbouncer --quiet "$1" &
            read -r _
            kill -KILL $!
            wait"#;
        unprivileged(Path::new("sh"))
            .args(["-c", WARDEN, "warden"])
            .arg(file)
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn wait_until_up(&self) {
        wait_until("PgBouncer is up", || {
            TcpStream::connect(("127.0.0.1", self.port)).is_ok()
        });
    }

    /// The URL of a database behind it.
    pub(crate) fn url(&self, database: &str) -> String {
        format!("postgres://postgres@127.0.0.1:{}/{database}", self.port)
    }

    /// Kills it.
    pub(crate) fn end(&mut self) {
        drop(self.warden.stdin.take());
        self.warden.wait().unwrap();
    }

    /// Changes its settings, for when it is started again.
    pub(crate) fn set(&self, from: &str, to: &str) {
        let file = self.folder.path().join("pgbouncer.ini");
        let text = std::fs::read_to_string(&file).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(&file, text.replace(from, to)).unwrap();
    }

    /// Starts it again after [`Self::end`].
    pub(crate) fn start_again(&mut self) {
        self.warden = Self::guarded(&self.folder.path().join("pgbouncer.ini"));
        self.wait_until_up();
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        self.end();
    }
}
