//! The airline example: the services of the sample application Acme Air, with the same paths and mix of calls.
//!
//! Service `auth` signs tokens. `customer`, `flight` and `booking` verify them. `booking` keeps bookings and calls
//! `flight` and `customer` for the miles. `main` serves the page. `traffic` and `load` simulate travellers. Each service
//! has a database of its own ([`store`]). Services get each other's address from the environment (`FLIGHT_URL=http://flight.airline:9080`) and speak
//! plain HTTP/1.1. Encryption and access rules are tasks of the mesh.

mod auth;
mod booking;
mod customer;
mod flight;
mod load;
mod peers;
mod service;
mod session;
mod site;
mod stats;
mod store;
mod token;
mod traffic;

use std::net::SocketAddr;

use anyhow::Context as _;
use axum::Router;
use clap::Subcommand;
use peers::Peer;
use store::{DatabaseSetting, Store};
use token::Key;
use tokio::net::TcpListener;

/// Service to run, and its settings.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    service: Service,
    /// Address to listen on.
    #[arg(long, env = "LISTEN", default_value = "0.0.0.0:9080", global = true)]
    listen: SocketAddr,
}

#[derive(Debug, Subcommand)]
enum Service {
    /// The web page.
    Main,
    /// Log-in; signs the tokens.
    Auth {
        #[command(flatten)]
        key: KeyArg,
        /// Address of the customer service.
        #[arg(long, env = "CUSTOMER_URL", default_value = "http://customer:9080")]
        customer_url: Peer,
    },
    /// Travellers and their miles.
    Customer {
        #[command(flatten)]
        key: KeyArg,
        #[command(flatten)]
        database: DatabaseArg,
    },
    /// Flights; two versions run side by side.
    Flight {
        #[command(flatten)]
        key: KeyArg,
        /// Version, returned in the header x-flight-version.
        #[arg(long, env = "FLIGHT_VERSION", default_value = "v1")]
        version: flight::Version,
        #[command(flatten)]
        database: DatabaseArg,
    },
    /// Bookings.
    Booking {
        #[command(flatten)]
        key: KeyArg,
        /// Address of the customer service.
        #[arg(long, env = "CUSTOMER_URL", default_value = "http://customer:9080")]
        customer_url: Peer,
        /// Address of the flight service.
        #[arg(long, env = "FLIGHT_URL", default_value = "http://flight:9080")]
        flight_url: Peer,
        #[command(flatten)]
        database: DatabaseArg,
    },
    /// Simulates travellers; /stats shows the results.
    Traffic(traffic::Args),
    /// Sends the calls of travellers for some time, and prints the result as JSON.
    Load(load::Args),
}

#[derive(Debug, clap::Args)]
struct KeyArg {
    /// Secret that signs the tokens (HS256), at least 32 bytes; the same for all services.
    #[arg(long = "jwt-key", env = "JWT_KEY", hide_env_values = true)]
    value: Key,
}

#[derive(Debug, clap::Args)]
struct DatabaseArg {
    /// Database of the service: a file, or PostgreSQL by the URL postgresql://USER:PASSWORD@HOST/NAME, which may have a
    /// parameter `host` with the folder of a socket. `temporary` is a file that is removed when the service ends.
    #[arg(long, env = "DATABASE", default_value = "temporary", hide_env_values = true)]
    database: DatabaseSetting,
}

/// Runs one of the services until SIGTERM or SIGINT.
///
/// # Errors
/// Fails if it cannot open the database or listen on the address, or if the server fails.
pub fn run(args: Args) -> anyhow::Result<()> {
    let _flush = skysail_core::logging::init(skysail_core::logging::Format::Text);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async move {
        let service = match args.service {
            Service::Load(load) => return load::run(load).await,
            service => service,
        };
        let address = args.listen;
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("cannot listen on {address}; if the port is in use, --listen selects another")
        })?;
        let name = service.name();
        let router = service.start().await.with_context(|| format!("cannot start {name}"))?;
        tracing::info!(service = name, address = %listener.local_addr()?, "serving");
        service::serve(listener, router).await
    })
}

impl Service {
    fn name(&self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Auth { .. } => "auth",
            Self::Customer { .. } => "customer",
            Self::Flight { .. } => "flight",
            Self::Booking { .. } => "booking",
            Self::Traffic(_) => "traffic",
            Self::Load(_) => "load",
        }
    }

    /// Opens the database and returns the service's routes. The traffic generator also starts its traffic.
    async fn start(self) -> anyhow::Result<Router> {
        match self {
            Self::Main => Ok(site::router()),
            Self::Auth { key, customer_url } => Ok(auth::router(key.value, customer_url)),
            Self::Customer { key, database } => {
                let store = Store::open(&database.database, "customer").await?;
                Ok(customer::router(key.value, store).await?)
            }
            Self::Flight { key, version, database } => {
                let store = Store::open(&database.database, version.table()).await?;
                Ok(flight::router(key.value, version, store).await?)
            }
            Self::Booking { key, customer_url, flight_url, database } => {
                let store = Store::open(&database.database, "booking").await?;
                Ok(booking::router(key.value, customer_url, flight_url, store))
            }
            Self::Traffic(args) => Ok(traffic::start(args)),
            // It has no routes.
            Self::Load(_) => Ok(Router::new()),
        }
    }
}

#[cfg(test)]
mod tests;
