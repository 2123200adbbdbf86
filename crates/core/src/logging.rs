//! Log set-up, the same for all programs: text or JSON lines on standard error.
//!
//! `SKYSAIL_LOG` takes `tracing` directives (`info`, `skysail_proxy=debug`); the default is `info`.

use std::io::IsTerminal as _;

use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt as _, util::SubscriberInitExt as _};

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For log collectors: one JSON object a line.
    Json,
}

/// Directs the process's log to standard error. A second call changes nothing.
pub fn init(format: Format) {
    let filter = EnvFilter::try_from_env("SKYSAIL_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    let layer = fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(std::io::stderr);
    // An error means that a subscriber stands already, which is what was asked for.
    let _ = match format {
        Format::Text => registry.with(layer).try_init(),
        Format::Json => registry.with(layer.json()).try_init(),
    };
}
