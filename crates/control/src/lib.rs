//! skysaild, the control plane: configuration sources, publication, discovery service, certificate service.
//!
//! Data flows in one direction:
//!
//! | Step | Modules |
//! |---|---|
//! | Settings | [`args`] |
//! | Input | `skysail_source` (watched files), `resolve` (DNS), `jwks` (key sets), `authority`, `tokens` (token keys), `token_reviews` (TokenReview) |
//! | Publication | `publish` (World, scopes, views, connected proxies), `prefetch` (virtual hosts by identity) |
//! | Authentication | `authentication` (principals), `platform` (pods and trust domains) |
//! | Services | `discovery`, `debug` (Istio's debug types), `certificates` |
//! | Sockets | `serving` (TLS and gRPC), `handshakes` (limits of TLS handshakes) |
//! | In a cluster | `webhook` (sidecars for pods), `cluster_status` (status of objects) |
//! | Admin pages | `admin`, `access` (authorization), `config_dump` (resources of a proxy), `metrics` |
//! | Start and end | `app` |
//!
//! All of them may use `audit` (audit log), `rate_limit`, `parallel` and `state_file`.

mod access;
mod admin;
mod app;
pub mod args;
mod audit;
mod authentication;
mod authority;
mod certificates;
mod cluster_status;
mod config_dump;
mod debug;
mod discovery;
mod gateway_deployments;
mod handshakes;
mod jwks;
mod metrics;
mod parallel;
mod platform;
mod prefetch;
mod publish;
mod rate_limit;
mod resolve;
mod serving;
mod state_file;
mod token_reviews;
mod tokens;
mod validation;
mod webhook;

pub use access::Account;
pub use app::run;
pub use args::Args;
pub use audit::Target;
