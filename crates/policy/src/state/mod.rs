//! State that changes while a configuration is in force. All workers share it.
//!
//! The types in [`config`](crate::config) are immutable. Where the request path needs state that belongs to a
//! configuration object, the object holds an [`Arc`](std::sync::Arc) handle of a type in this module. A worker then
//! finds the state with the object and needs no second lookup per request.
//!
//! | state | changed by | handle in |
//! |---|---|---|
//! | [`Published`], [`PublishedOption`] | the discovery client, the JWT filter, the first worker that needs a hash table | `Cluster::endpoints`, `Cluster::hash_tables`, `ServerTls::config`, `ClientTls::config`, `RemoteKeys::fetched` |
//! | [`circuit_breaker::Usage`] | workers, per connection and request | `Cluster::usage` |
//! | [`health::OutlierState`] | the worker that ejects or restores an endpoint | `Outlier::state` |
//! | [`health::EndpointState`] | workers, per response and connection | `Endpoint::track` |
//! | [`rate_limit::TokenBucket`] | workers, per request | `RateLimit::bucket` |
//! | [`demand::Demand`] | the discovery client; workers send questions | `RouteTable::demand` |
//! | [`demand::UseMark`] | workers set it, the discovery client clears it | `VirtualHost::used` |
//!
//! This module uses no type of `config`, so that the dependency runs one way.

use arc_swap::{ArcSwap, ArcSwapOption};

pub mod circuit_breaker;
pub mod demand;
pub mod health;
pub mod rate_limit;

/// A value that is replaced as a whole. Readers take no lock and keep the value that they loaded.
pub type Published<T> = ArcSwap<T>;

/// As [`Published`], for a value that may be missing.
pub type PublishedOption<T> = ArcSwapOption<T>;
