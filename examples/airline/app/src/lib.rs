//! The airline example: the services of the sample application Acme Air, with the same paths and mix of calls.
//!
//! Service `auth` signs tokens. `customer`, `flight` and `booking` verify them. `booking` keeps bookings and calls
//! `flight` and `customer` for the miles. `main` serves the page, and `traffic` simulates travellers. State is kept in
//! memory. Services get each other's address from the environment (`FLIGHT_URL=http://flight.airline:9080`) and speak
//! plain HTTP/1.1. Encryption and access rules are tasks of the mesh.

mod auth;
mod booking;
mod customer;
mod flight;
mod peers;
mod service;
mod site;
mod stats;
mod token;
mod traffic;

use std::net::SocketAddr;

use anyhow::Context as _;
use axum::Router;
use clap::Subcommand;
use peers::Peer;
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
    },
    /// Flights; two versions run side by side.
    Flight {
        #[command(flatten)]
        key: KeyArg,
        /// Version, returned in the header x-flight-version.
        #[arg(long, env = "FLIGHT_VERSION", default_value = "v1")]
        version: flight::Version,
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
    },
    /// Simulates travellers; /stats shows the results.
    Traffic(traffic::Args),
}

#[derive(Debug, clap::Args)]
struct KeyArg {
    /// Secret that signs the tokens (HS256), at least 32 bytes; the same for all services.
    #[arg(long = "jwt-key", env = "JWT_KEY", hide_env_values = true)]
    value: Key,
}

/// Runs one of the services until SIGTERM or SIGINT.
///
/// # Errors
/// Fails if it cannot listen on the address, or if the server fails.
pub fn run(args: Args) -> anyhow::Result<()> {
    let _flush = skysail_core::logging::init(skysail_core::logging::Format::Text);
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async move {
        let address = args.listen;
        let listener = TcpListener::bind(address).await.with_context(|| {
            format!("cannot listen on {address}; if the port is in use, --listen selects another")
        })?;
        let name = args.service.name();
        let router = args.service.start();
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
        }
    }

    /// Returns the service's routes. The traffic generator also starts its traffic.
    fn start(self) -> Router {
        match self {
            Self::Main => site::router(),
            Self::Auth { key, customer_url } => auth::router(key.value, customer_url),
            Self::Customer { key } => customer::router(key.value),
            Self::Flight { key, version } => flight::router(key.value, version),
            Self::Booking { key, customer_url, flight_url } => {
                booking::router(key.value, customer_url, flight_url)
            }
            Self::Traffic(args) => traffic::start(args),
        }
    }
}

#[cfg(test)]
mod tests;
