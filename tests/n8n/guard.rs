//! Ends a process together with the tests, however they end: what is static is never dropped.

use std::process::{Child, Command, Stdio};

/// A shell that kills a process (-9) when its input closes. To be dropped before the process is
/// waited for, or it might meet another of the same number.
pub(crate) struct Guard(Child);

impl Guard {
    pub(crate) fn of(pid: u32) -> Self {
        let shell = Command::new("sh")
            .args([
                "-c",
                "read -r _; kill -KILL \"$1\"",
                "guard",
                &pid.to_string(),
            ])
            .stdin(Stdio::piped())
            .spawn();
        Self(shell.unwrap())
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
