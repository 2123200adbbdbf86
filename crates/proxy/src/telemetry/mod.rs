//! Telemetry: Istio's metrics, Envoy's usual counters, access logs, spans.
//!
//! Workers fill one [`Record`](skysail_policy::record::Record) per request or connection. Each worker adds to
//! the plain numbers of its own [`Shard`]; a scrape takes a [`ShardSnapshot`] of every worker and renders their
//! sum. A thread of its own writes log lines from a bounded buffer, so that no worker waits for a disk.

pub mod access_log;
mod attributes;
mod entries;
pub(crate) mod export;
pub(crate) mod filter;
pub mod plain;
mod records;
mod render;
mod series;
pub mod shard;
pub mod span;
pub mod stats;

pub use access_log::{AccessLogger, LogWriter};
pub(crate) use attributes::attribute_json;
pub(crate) use entries::{entry, structure};
pub(crate) use records::record as log_record;
pub use render::{Metrics, Page, collect};
pub use series::TcpCounts;
pub use shard::{Shard, ShardSnapshot};
