//! State that changes while a configuration is in effect. All workers share it.
//!
//! The types in [`config`](crate::config) are immutable. Where the request path needs state that belongs to a
//! configuration object, the object holds an [`Arc`](std::sync::Arc) handle of a type in this module. A worker then
//! finds the state with the object and needs no second lookup per request.
//!
//! - [`Published`] and [`PublishedOption`] hold values that are replaced as a whole: `Cluster::endpoints`,
//!   `Cluster::hash_tables`, `ServerTls::config`, `ClientTls::config` and `RemoteKeys::fetched`. The discovery client
//!   replaces the endpoints and the TLS settings, the JWT filter the keys, and a worker the hash tables.
//! - [`circuit_breaker::Usage`] counts connections and requests; workers change it. Handle: `Cluster::usage`.
//! - [`connections::OpenConnections`] counts the downstream connections under a limit. Part of
//!   `ConnectionLimit`.
//! - [`health::OutlierState`] changes when a worker ejects or restores an endpoint. Handle: `Outlier::state`.
//! - [`health::EndpointState`] changes with responses and connections. Handle: `Endpoint::state`.
//! - [`rate_limit::Buckets`] change with each request. Handle: `RateLimit::buckets`; a connection may have its own.
//! - [`demand::Demand`] is written by the discovery client; workers send it requests for hosts. Handle:
//!   `RouteTable::demand`.
//! - [`demand::UseMark`] is set by workers and cleared by the discovery client. Handle: `VirtualHost::used`.
//!
//! This module uses no type of `config`, so that the dependency runs one way.

use arc_swap::{ArcSwap, ArcSwapOption};

pub mod circuit_breaker;
pub mod connections;
pub mod demand;
pub mod health;
pub mod rate_limit;

/// A value that is replaced as a whole. Readers take no lock and keep the value that they loaded.
pub type Published<T> = ArcSwap<T>;

/// As [`Published`], for a value that may be missing.
pub type PublishedOption<T> = ArcSwapOption<T>;
