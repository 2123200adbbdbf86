//! Log set-up, the same for all programs: text or JSON lines on standard error.
//!
//! Every value is escaped and truncated when the line is composed ([`printable`]). No peer can forge lines, control a
//! terminal or fill a disk.
//!
//! `SKYSAIL_LOG` takes `tracing` directives (`info`, `skysail_proxy=debug`); the default is `info`. The directives can
//! be changed while the program runs. A level without a module applies to Skysail's modules. Libraries log errors only,
//! unless named (`h2=debug`): at lower levels some write a line for each frame that a peer sends before it has
//! authenticated.

mod lines;
mod values;

use std::{
    fmt::Display,
    io::IsTerminal as _,
    panic::{self, PanicHookInfo},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use self::values::{Json, Text};
pub use self::{
    lines::Flush,
    values::{MAX_VALUE_LENGTH, Throttle},
};
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{
    EnvFilter, Registry,
    filter::{Directive, ParseError},
    fmt,
    layer::SubscriberExt as _,
    reload,
    util::SubscriberInitExt as _,
};

/// Level of modules that are not named, unless that of Skysail's is lower.
const LIBRARY_LEVEL: LevelFilter = LevelFilter::ERROR;
/// Prefix of the names of Skysail's modules.
const MODULE_PREFIX: &str = "skysail";

/// Filter of the process's log, once [`init`] has set it up.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// Number of panics since the start.
static PANICS: AtomicU64 = AtomicU64::new(0);

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Text for people.
    #[default]
    Text,
    /// One JSON object per line, for log collectors.
    Json,
}

/// Error from changing a log level.
#[derive(Debug, thiserror::Error)]
pub enum LevelError {
    /// The text is not the name of a module.
    #[error("{0:?} is not a logger: name a module, such as skysail_proxy::discovery")]
    NoLogger(String),
    /// [`init`] did not set up the log.
    #[error("the log of this process cannot be changed")]
    Fixed,
}

/// Directs the process's log to standard error. A second call changes nothing. Keep the returned value until the end.
pub fn init(format: Format) -> Flush {
    let flush = lines::start();
    let wanted = std::env::var("SKYSAIL_LOG").ok().and_then(|wanted| filter(&wanted).ok());
    let filter = wanted.unwrap_or_else(|| EnvFilter::new(default_directives(LevelFilter::INFO)));
    let (filter, handle) = reload::Layer::new(filter);
    let registry = tracing_subscriber::registry().with(filter);
    let layer = fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(|| lines::Line);
    let layer = layer.fmt_fields(Text);
    let outcome = match format {
        Format::Text => registry.with(layer).try_init(),
        Format::Json => registry.with(layer.event_format(Json)).try_init(),
    };
    // An error means that a subscriber is already set, as intended.
    if outcome.is_ok() {
        let _ = FILTER.set(handle);
        panic::set_hook(Box::new(log_panic));
    }
    flush
}

/// Returns the number of lines dropped since the start because standard error was not read fast enough.
pub fn dropped_lines() -> u64 {
    lines::LINES.dropped()
}

fn filter(directives: &str) -> Result<EnvFilter, ParseError> {
    let directives =
        directives.split(',').map(str::trim).map(|directive| match directive.parse::<LevelFilter>() {
            Ok(level) => default_directives(level),
            Err(_) => directive.to_owned(),
        });
    EnvFilter::try_new(
        [LIBRARY_LEVEL.to_string()].into_iter().chain(directives).collect::<Vec<_>>().join(","),
    )
}

/// Returns the directives by which Skysail's modules log at a level, and other modules errors.
fn default_directives(level: LevelFilter) -> String {
    format!("{},{MODULE_PREFIX}={level}", LIBRARY_LEVEL.min(level))
}

/// Formats a value from outside so that it can be logged, kept or shown. The result has no characters that move the
/// cursor, end the line or change the direction of the text. It has at most [`MAX_VALUE_LENGTH`] bytes, followed by the
/// number of bytes left out.
pub fn printable(value: impl Display) -> String {
    let mut out = String::new();
    // Writing to a `String` cannot fail.
    let _ = values::write_escaped(&mut out, format_args!("{value}"));
    out
}

/// Returns the number of panics since the start. A panic is a mistake in the program.
pub fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

fn log_panic(info: &PanicHookInfo<'_>) {
    PANICS.fetch_add(1, Ordering::Relaxed);
    let thread = thread::current();
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    let reason = info.payload_as_str().unwrap_or("no reason given");
    tracing::error!(
        thread = thread.name().unwrap_or("unnamed"),
        place,
        "a panic, which is a bug in this program; please report it: {reason}"
    );
}

/// Changes the level of a module and those inside it, or without a module that of all of Skysail's modules.
///
/// # Errors
/// Fails if this is not the name of a module, or if [`init`] did not set up the log.
pub fn set_level(module: Option<&str>, level: LevelFilter) -> Result<(), LevelError> {
    let directive = module.map(|module| directive(module, level)).transpose()?;
    let handle = FILTER.get().ok_or(LevelError::Fixed)?;
    let change = |filter: &mut EnvFilter| {
        *filter = match directive {
            Some(directive) => std::mem::take(filter).add_directive(directive),
            None => EnvFilter::new(default_directives(level)),
        };
    };
    handle.modify(change).map_err(|_| LevelError::Fixed)
}

/// Returns the log level of each module. The entry without a name applies to all other modules of Skysail.
pub fn levels() -> Vec<(Option<String>, String)> {
    let current = FILTER.get().and_then(|handle| handle.with_current(ToString::to_string).ok());
    let directives = current.unwrap_or_default();
    let level = |directive: &str| {
        let (module, level) = directive.rsplit_once('=')?;
        Some(((module != MODULE_PREFIX).then(|| module.to_owned()), level.to_owned()))
    };
    directives.split(',').filter_map(level).collect()
}

fn directive(module: &str, level: LevelFilter) -> Result<Directive, LevelError> {
    let named = !module.is_empty() && module.chars().all(|c| c.is_ascii_alphanumeric() || "_:-".contains(c));
    let parsed = format!("{module}={level}").parse();
    parsed.ok().filter(|_| named).ok_or_else(|| LevelError::NoLogger(module.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_log_only_errors_unless_named() {
        let logged = |directives: &str| {
            let mut lines = Vec::new();
            let subscriber = tracing_subscriber::registry().with(filter(directives).unwrap());
            tracing::subscriber::with_default(subscriber, || {
                // A line for each PING that was not awaited, for each TLS alert, and events of the `log` crate.
                lines = vec![
                    tracing::enabled!(target: "h2::proto::ping_pong", tracing::Level::WARN),
                    tracing::enabled!(target: "rustls::conn", tracing::Level::WARN),
                    tracing::enabled!(target: "log", tracing::Level::WARN),
                    tracing::enabled!(target: "h2::codec", tracing::Level::ERROR),
                    tracing::enabled!(target: "skysail_xds::limits", tracing::Level::INFO),
                ];
            });
            lines
        };
        assert_eq!(logged("info"), [false, false, false, true, true]);
        assert_eq!(logged("trace"), [false, false, false, true, true]);
        assert_eq!(logged("skysail_xds=debug"), [false, false, false, true, true]);
        assert_eq!(logged("warn, h2=warn"), [true, false, false, true, false]);
        assert_eq!(logged("off"), [false; 5]);
    }

    #[test]
    fn levels_change_at_run_time() {
        let _flush = init(Format::Text);
        set_level(None, LevelFilter::WARN).unwrap();
        assert_eq!(levels(), [(None, "warn".to_owned())]);
        assert!(!tracing::enabled!(target: "skysail_acme", tracing::Level::INFO));
        set_level(Some("skysail_acme::shop"), LevelFilter::DEBUG).unwrap();
        assert!(levels().contains(&(Some("skysail_acme::shop".to_owned()), "debug".to_owned())));
        assert!(tracing::enabled!(target: "skysail_acme::shop::cart", tracing::Level::DEBUG));
        assert!(!tracing::enabled!(target: "skysail_acme", tracing::Level::INFO));
        set_level(None, LevelFilter::INFO).unwrap();
        assert!(!tracing::enabled!(target: "skysail_acme::shop::cart", tracing::Level::DEBUG));
        assert!(tracing::enabled!(target: "skysail_acme", tracing::Level::INFO));
        for bad in ["", "a b", "a[b]", "a=b", "a,b"] {
            assert!(matches!(set_level(Some(bad), LevelFilter::INFO), Err(LevelError::NoLogger(_))), "{bad}");
        }
    }
}
