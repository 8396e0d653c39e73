//! Reads the settings, starts logging, and hands over to the application.

use std::process::ExitCode;

use clap::Parser;
use dedup_gate::app;
use dedup_gate::config::{Cli, Command};
use mimalloc::MiMalloc;

/// A claim makes and frees some dozens of small pieces of memory, often on another thread.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

#[actix_web::main]
async fn main() -> ExitCode {
    let cli = Cli::parse();
    env_logger::Builder::from_env(
        env_logger::Env::default().default_filter_or("info,actix_server=warn"),
    )
    .init();
    match app::run(cli.command.unwrap_or(Command::Serve), &cli.settings).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(fault) => {
            eprintln!("dedup-gate: {fault}");
            ExitCode::FAILURE
        }
    }
}
