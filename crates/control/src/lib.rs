//! skysaild: sources, publication, discovery service, certificate service.
//!
//! Data flows one way, and so do the modules: [`args`] (settings) → `source` (files, watched) and `resolve` (DNS) → `publish` (World,
//! compiled views, who is connected) and `habits` (what workloads use) → `discovery` and `certificates` (what proxies call, after
//! `authentication` said who they are by what `platform` knows, the latter signed by what `authority` keeps) → `serving` (sockets and TLS) → `admin` (pages for people and
//! Prometheus, for whom `access` lets in), and beside all of them `audit` (what security depends on, on record) and `bucket` (rate limits) → `app` (all of it, start to end).

mod access;
mod admin;
mod app;
pub mod args;
mod audit;
mod authentication;
mod authority;
mod bucket;
mod certificates;
mod debug;
mod discovery;
mod habits;
mod kept;
mod metrics;
mod parallel;
mod places;
mod platform;
mod publish;
mod resolve;
mod serving;
mod tokens;

pub use access::Account;
pub use app::run;
pub use args::Args;
pub use audit::Target;
