//! What happened: Istio's metrics, Envoy's usual counters, access logs.
//!
//! Workers fill one [`Record`](skysail_policy::record::Record) for each request or connection. A [`Shard`] belongs to one worker and adds to
//! plain numbers; scraping asks every worker for a [`ShardSnapshot`] and renders their sum. Log lines go to a
//! thread of their own by way of a bounded buffer, so that no worker waits for a disk.

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
pub(crate) use entries::entry;
pub(crate) use records::record as log_record;
pub use render::{Metrics, Page, collect};
pub use series::TcpCounts;
pub use shard::{Shard, ShardSnapshot};
