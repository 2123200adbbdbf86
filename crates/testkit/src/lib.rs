//! Tools for tests: a mesh that ends with the test ([`Mesh`]), calls from inside it, clients outside of it
//! ([`Client`]), and load that counts responses ([`Load`]). Also a DNS server ([`Dns`]), a terminal ([`Terminal`]), and
//! a wait for a condition ([`eventually`]).
//!
//! Everything here panics when a condition of the test is not met: the panic is the test's failure.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panic")]

mod cache;
mod client;
mod dns;
mod go;
mod load;
mod mesh;
mod objects;
mod program;
mod terminal;
mod wait;

pub use cache::{cached, envoy};
pub use client::{Client, ClientCertificate, wait_response};
pub use dns::{Dns, DnsAnswer};
pub use go::go_program;
pub use load::{Load, Report};
pub use mesh::{Answer, Ended, Mesh, Setup, copy_folder};
pub use objects::{pod, service};
pub use program::{install, script};
pub use terminal::Terminal;
pub use wait::eventually;
