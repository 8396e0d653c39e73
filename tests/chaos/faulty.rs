//! The service with the fault in its rules that `PLANTED_FAULT` names, for `tests/chaos` to find.

use std::process::ExitCode;

use clap::Parser;
use dedup_gate::app;
use dedup_gate::config::{Cli, Command};
use dedup_gate::domain::planted::plant;

#[actix_web::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    env_logger::init();
    let planted = std::env::var("PLANTED_FAULT")
        .map_err(|error| format!("PLANTED_FAULT: {error}"))
        .and_then(|name| plant(&name));
    let ended = match planted {
        Ok(()) => app::run(cli.command.unwrap_or(Command::Serve), &cli.settings).await,
        fault => fault,
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("dedup-gate-faulty: {fault}");
            ExitCode::FAILURE
        }
    }
}
