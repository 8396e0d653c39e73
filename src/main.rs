//! Reads the settings, starts logging, and hands over to the application.

use std::process::exit;

use dedup_gate::app;
use dedup_gate::config::{Cli, Command};
use mimalloc::MiMalloc;

/// A claim makes and frees some dozens of small pieces of memory, often on another thread.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

#[actix_web::main]
async fn main() {
    let cli = Cli::read();
    env_logger::Builder::from_env(
        env_logger::Env::default().default_filter_or("info,actix_server=warn"),
    )
    .init();
    let done = app::run(cli.command.unwrap_or(Command::Serve), &cli.settings).await;
    if let Err(fault) = &done {
        eprintln!("dedup-gate: {fault}");
    }
    // To return would wait for calls that hang in the database, or in a name server.
    exit(i32::from(done.is_err()));
}
