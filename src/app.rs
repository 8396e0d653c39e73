//! Puts the service together: store, gate, listener, shutdown.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use actix_web::{App, HttpServer, web};
use chrono::TimeDelta;
use secrecy::ExposeSecret;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::api::auth::ApiKeys;
use crate::api::problem::Code;
use crate::api::{self, request_log};
use crate::config::{Command, Database, Settings};
use crate::domain::effect::Patience;
use crate::domain::route::Routes;
use crate::gate::{Gate, LaneLimits};
use crate::lab::Lab;
use crate::metrics::Metrics;
use crate::outbox::send::Sender;
use crate::outbox::{self, Outbox};
use crate::retention::{self, Others};
use crate::store::lab::LabStore;
use crate::store::postgres::PostgresStore;
use crate::store::sqlite::SqliteStore;
use crate::store::{StartError, Store};

/// How long what is in flight may take after SIGTERM, in seconds: a request takes three at most, and ten are what
/// Docker and others give.
const SHUTDOWN_SECONDS: u64 = 9;

/// How many connections to Postgres the lab takes beside those of its lanes.
const LAB_CONNECTIONS: u32 = 5;

/// How long between two tries to reach the database at start.
const DATABASE_RETRY: Duration = Duration::from_millis(500);

/// Does what the command says.
///
/// # Errors
///
/// One line for whoever started it.
pub async fn run(command: Command, settings: &Settings) -> Result<(), String> {
    match command {
        Command::Serve => serve(settings).await,
        Command::Migrate => open_store(settings).await.map(drop),
        Command::Purge => purge(settings).await,
        Command::Healthcheck => healthcheck(settings),
        Command::Openapi => {
            print!("{}", api::openapi::text());
            Ok(())
        }
    }
}

async fn serve(settings: &Settings) -> Result<(), String> {
    let keys = settings.api_keys()?;
    let addresses = settings.listen()?;
    if keys.is_empty() && !addresses.iter().all(|address| address.ip().is_loopback()) {
        return Err(
            "LISTEN is beyond loopback and API_KEYS is not set: anybody who reaches it could claim and report; set API_KEYS=n8n:SECRET (for SECRET, openssl rand -hex 32), or LISTEN=127.0.0.1:8080".into(),
        );
    }
    let retry_policy = web::Data::new(settings.retry_policy()?);
    let retention = settings.retention()?;
    let metrics = Arc::new(Metrics::new(&Code::names()));
    let gate = open_gate(settings, Arc::clone(&metrics)).await?;
    let lab = match settings.lab {
        true => Some(web::Data::new(open_lab(settings).await?)),
        false => None,
    };
    let (gate, metrics) = (web::Data::new(gate), web::Data::from(metrics));
    if let Some(kept) = retention {
        let gate = gate.clone();
        actix_web::rt::spawn(async move { retention::run(&gate, kept).await });
    }
    let api_keys = web::Data::new(ApiKeys::new(
        keys.iter()
            .map(|key| (key.name.as_str(), key.secret.expose_secret())),
    ));
    let routes = web::Data::new(settings.outbox_routes()?);
    let (secrets, allowed) = (settings.outbox_secrets()?, settings.outbox_allowed_hosts()?);
    let sender = Sender::new(secrets, allowed, settings.outbox_timeout())?;
    sender.check(&routes).await?;
    let patience = settings.outbox_patience()?;
    let body_limit = settings.body_limit as usize;
    let listener = bind(&addresses)?;
    let address = listener.local_addr().map_err(|error| error.to_string())?;
    let outbox = Outbox::new(
        gate.clone().into_inner(),
        metrics.clone().into_inner(),
        sender,
        patience.clone(),
        settings.outbox_timeout(),
    );
    let (stop, mut stopped) = watch::channel(false);
    let mut deliveries = vec![(outbox, routes.clone().into_inner())];
    if let Some(lab) = &lab {
        deliveries.push(lab_outbox(lab, address, patience, settings)?);
    }
    let settled = outbox::start(deliveries, stopped.clone()).map_err(|error| error.to_string())?;
    let server = HttpServer::new(move || {
        App::new()
            .app_data(gate.clone())
            .app_data(metrics.clone())
            .app_data(api_keys.clone())
            .app_data(retry_policy.clone())
            .app_data(routes.clone())
            .wrap_fn(request_log::observe)
            .configure(|routes| api::configure(routes, body_limit, lab.clone()))
    })
    .disable_signals()
    .shutdown_timeout(SHUTDOWN_SECONDS)
    .listen(listener)
    .map_err(|error| format!("LISTEN: {error}"))?
    .run();

    let handle = server.handle();
    let mut terminate = signal(SignalKind::terminate()).map_err(|error| error.to_string())?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(|error| error.to_string())?;
    actix_web::rt::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        log::info!("stopping: finishing what is in flight");
        stop.send_replace(true);
        handle.stop(true).await;
    });
    log::info!("listening on {address}");
    let ended = async {
        server.await.map_err(|error| error.to_string())?;
        let _ = settled.await;
        Ok(())
    };
    let overdue = async {
        let _ = stopped.wait_for(|is_stopped| *is_stopped).await;
        sleep(Duration::from_secs(SHUTDOWN_SECONDS)).await;
    };
    tokio::select! {
        ended = ended => ended,
        // Deliveries that are not settled are sent again when their leases have run out.
        () = overdue => {
            log::warn!("stopping, with something still in flight");
            Ok(())
        }
    }
}

fn bind(addresses: &[SocketAddr]) -> Result<TcpListener, String> {
    let listener = TcpListener::bind(addresses).map_err(|error| {
        let addresses: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        format!("LISTEN: cannot listen on {}: {error}", addresses.join(", "))
    })?;
    listener
        .set_nonblocking(true)
        .map_err(|error| error.to_string())?;
    Ok(listener)
}

/// Removes what is over, and says how much that was.
async fn purge(settings: &Settings) -> Result<(), String> {
    let kept = settings
        .retention()?
        .ok_or("RETENTION is not set: everything is kept for ever")?;
    let metrics = Arc::new(Metrics::new(&Code::names()));
    let gate = open_gate(settings, metrics).await?;
    let purged = retention::purge(&gate, kept, Others::Wait)
        .await
        .map_err(|error| error.to_string())?;
    println!("removed {purged}");
    Ok(())
}

async fn open_gate(settings: &Settings, metrics: Arc<Metrics>) -> Result<Gate, String> {
    let (store, connections) = open_store(settings).await?;
    Ok(Gate::new(
        store,
        connections,
        lane_limits(settings),
        metrics,
    ))
}

fn lane_limits(settings: &Settings) -> LaneLimits {
    LaneLimits {
        queue: settings.claim_queue as usize,
        batch: settings.claim_batch as usize,
    }
}

/// Opens and migrates the store.
async fn open_store(settings: &Settings) -> Result<(Arc<dyn Store>, u32), String> {
    let replay_window = TimeDelta::seconds(settings.replay_window.into());
    // The others are the lanes'.
    let connections = settings.database_connections - 3;
    let database = settings.database()?;
    when_in_reach(settings, || match &database {
        Database::Postgres(url) => {
            let is_pooled = settings.database_pooler;
            PostgresStore::open(url.expose_secret(), is_pooled, connections, replay_window)
                .map(|store| (Arc::new(store) as Arc<dyn Store>, connections))
        }
        Database::Sqlite(path) => SqliteStore::open(path, replay_window)
            .map(|store| (Arc::new(store) as Arc<dyn Store>, SqliteStore::CONNECTIONS)),
    })
    .await
}

/// Opens the lab, whose gate is counted for itself.
async fn open_lab(settings: &Settings) -> Result<Lab, String> {
    let replay_window = TimeDelta::seconds(settings.replay_window.into());
    let database = settings.database()?;
    let (store, lab_store, connections) = when_in_reach(settings, || match &database {
        Database::Postgres(url) => {
            let (url, is_pooled) = (url.expose_secret(), settings.database_pooler);
            let store = PostgresStore::open_lab(url, is_pooled, LAB_CONNECTIONS, replay_window)?;
            Ok(both(store, LAB_CONNECTIONS))
        }
        Database::Sqlite(path) => {
            let store = SqliteStore::open_lab(path, replay_window)?;
            Ok(both(store, SqliteStore::CONNECTIONS))
        }
    })
    .await?;
    let metrics = Arc::new(Metrics::new(&[]));
    let gate = Gate::new(store, connections, lane_limits(settings), metrics);
    Ok(Lab::new(Arc::new(gate), lab_store))
}

/// What delivers the lab's effects: to the lab itself.
fn lab_outbox(
    lab: &Lab,
    address: SocketAddr,
    patience: Patience,
    settings: &Settings,
) -> Result<(Outbox, Arc<Routes>), String> {
    let address = reachable(address);
    let allowed = [address.ip().to_string()];
    let token = lab.token();
    let routes = Routes::parse(
        &format!("*=http://{address}/lab/receipts/{token}"),
        &allowed,
    )?;
    let timeout = settings.outbox_timeout();
    let sender = Sender::new(Vec::new(), allowed.to_vec(), timeout)?;
    let metrics = Arc::new(Metrics::new(&[]));
    let outbox = Outbox::new(Arc::clone(lab.gate()), metrics, sender, patience, timeout);
    Ok((outbox, Arc::new(routes)))
}

fn both<S: Store + LabStore + 'static>(
    store: S,
    connections: u32,
) -> (Arc<dyn Store>, Arc<dyn LabStore>, u32) {
    let store = Arc::new(store);
    (Arc::clone(&store) as _, store, connections)
}

/// Opens what may be out of reach, and is waited for then.
async fn when_in_reach<T>(
    settings: &Settings,
    open: impl Fn() -> Result<T, StartError>,
) -> Result<T, String> {
    let give_up = Instant::now() + settings.database_wait();
    let mut has_said = false;
    loop {
        match open() {
            Ok(opened) => return Ok(opened),
            Err(StartError::Unusable(fault)) => return Err(fault),
            Err(StartError::Unavailable(fault)) if Instant::now() + DATABASE_RETRY > give_up => {
                return Err(format!(
                    "the database is out of reach (waited {} s, DATABASE_WAIT): {fault}",
                    settings.database_wait().as_secs()
                ));
            }
            Err(StartError::Unavailable(fault)) => {
                if !has_said {
                    log::warn!("waiting for the database: {fault}");
                    has_said = true;
                }
                sleep(DATABASE_RETRY).await;
            }
        }
    }
}

/// Where this machine reaches what listens there.
fn reachable(address: SocketAddr) -> SocketAddr {
    let ip = match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, address.port())
}

/// Asks the service that listens where the settings say.
fn healthcheck(settings: &Settings) -> Result<(), String> {
    let addresses = settings.listen()?;
    let address = addresses.first().ok_or("LISTEN: the name has no address")?;
    let url = format!("http://{}/health/ready", reachable(*address));
    let agent: ureq::Agent = ureq::Agent::config_builder()
        .timeout_global(Some(Duration::from_secs(4)))
        .proxy(None)
        .build()
        .into();
    agent
        .get(&url)
        .call()
        .map(drop)
        .map_err(|error| format!("not ready: {url}: {error}"))
}
