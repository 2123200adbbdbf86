//! Log set-up, the same for all programs: text or JSON lines on standard error.
//!
//! Every value is escaped and cut on its way into the line ([`printable`]), so that no peer can forge lines, drive a terminal or
//! fill a disk with what it sends.
//!
//! `SKYSAIL_LOG` takes `tracing` directives (`info`, `skysail_proxy=debug`); the default is `info`. What is logged can be
//! changed while the program runs. A level without a module is that of Skysail's modules. Libraries log errors only, unless they are
//! named (`h2=debug`): at lower levels some write a line for each frame that a peer sends, before it has said who it is.

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
    values::{LONGEST_VALUE, Throttle},
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

/// The level of modules that are not named, unless that of Skysail's is lower.
const OTHERS: LevelFilter = LevelFilter::ERROR;
/// What the names of Skysail's modules begin with.
const OURS: &str = "skysail";

/// What is logged, once [`init`] has set up the process's log.
static FILTER: OnceLock<reload::Handle<EnvFilter, Registry>> = OnceLock::new();

/// What has failed by a panic since the start.
static PANICS: AtomicU64 = AtomicU64::new(0);

/// How log lines look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// For people.
    #[default]
    Text,
    /// For log collectors: one JSON object a line.
    Json,
}

/// Why it cannot be changed what is logged.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Not the name of a module.
    #[error("{0:?} is not a logger: name a module, such as skysail_proxy::discovery")]
    NoLogger(String),
    /// Something else than [`init`] set up the log.
    #[error("the log of this process cannot be changed")]
    Fixed,
}

/// Directs the process's log to standard error. A second call changes nothing. Keep what it returns until the end.
pub fn init(format: Format) -> Flush {
    let flush = lines::start();
    let wanted = std::env::var("SKYSAIL_LOG").ok().and_then(|wanted| filter(&wanted).ok());
    let filter = wanted.unwrap_or_else(|| EnvFilter::new(of_ours(LevelFilter::INFO)));
    let (filter, handle) = reload::Layer::new(filter);
    let registry = tracing_subscriber::registry().with(filter);
    let layer = fmt::layer().with_ansi(std::io::stderr().is_terminal()).with_writer(|| lines::Line);
    let layer = layer.fmt_fields(Text);
    let outcome = match format {
        Format::Text => registry.with(layer).try_init(),
        Format::Json => registry.with(layer.event_format(Json)).try_init(),
    };
    // An error means that a subscriber stands already, which is what was asked for.
    if outcome.is_ok() {
        let _ = FILTER.set(handle);
        panic::set_hook(Box::new(tell));
    }
    flush
}

/// How many lines were lost since the start, because standard error was not read fast enough.
pub fn lost_lines() -> u64 {
    lines::LINES.lost()
}

fn filter(directives: &str) -> Result<EnvFilter, ParseError> {
    let directives =
        directives.split(',').map(str::trim).map(|directive| match directive.parse::<LevelFilter>() {
            Ok(level) => of_ours(level),
            Err(_) => directive.to_owned(),
        });
    EnvFilter::try_new([OTHERS.to_string()].into_iter().chain(directives).collect::<Vec<_>>().join(","))
}

/// The directives by which Skysail's modules log at a level, and others errors.
fn of_ours(level: LevelFilter) -> String {
    format!("{},{OURS}={level}", OTHERS.min(level))
}

/// A value from outside as it may be logged, kept or shown: without characters that move the cursor, end the line or change the
/// direction of the text, and of at most [`LONGEST_VALUE`] bytes, followed by the number of those left out.
pub fn printable(value: impl Display) -> String {
    let mut out = String::new();
    // A string takes everything.
    let _ = values::write_escaped(&mut out, format_args!("{value}"));
    out
}

/// How often something failed by a panic, which is a mistake in the program, since the start.
pub fn panics() -> u64 {
    PANICS.load(Ordering::Relaxed)
}

fn tell(info: &PanicHookInfo<'_>) {
    PANICS.fetch_add(1, Ordering::Relaxed);
    let thread = thread::current();
    let place = info.location().map(ToString::to_string).unwrap_or_default();
    let reason = info.payload_as_str().unwrap_or("no reason given");
    tracing::error!(
        thread = thread.name().unwrap_or("unnamed"),
        place,
        "a mistake in this program, please report it: {reason}"
    );
}

/// Changes what is logged: of a module and those inside it, or where none is named of all of Skysail's.
///
/// # Errors
/// When this is no module's name, or [`init`] did not set up the log.
pub fn set_level(module: Option<&str>, level: LevelFilter) -> Result<(), Error> {
    let directive = module.map(|module| directive(module, level)).transpose()?;
    let handle = FILTER.get().ok_or(Error::Fixed)?;
    let change = |filter: &mut EnvFilter| {
        *filter = match directive {
            Some(directive) => std::mem::take(filter).add_directive(directive),
            None => EnvFilter::new(of_ours(level)),
        };
    };
    handle.modify(change).map_err(|_| Error::Fixed)
}

/// The log level of each module; the entry without a name is for all other modules of Skysail.
pub fn levels() -> Vec<(Option<String>, String)> {
    let current = FILTER.get().and_then(|handle| handle.with_current(ToString::to_string).ok());
    let directives = current.unwrap_or_default();
    let level = |directive: &str| {
        let (module, level) = directive.rsplit_once('=')?;
        Some(((module != OURS).then(|| module.to_owned()), level.to_owned()))
    };
    directives.split(',').filter_map(level).collect()
}

fn directive(module: &str, level: LevelFilter) -> Result<Directive, Error> {
    let named = !module.is_empty() && module.chars().all(|c| c.is_ascii_alphanumeric() || "_:-".contains(c));
    let parsed = format!("{module}={level}").parse();
    parsed.ok().filter(|_| named).ok_or_else(|| Error::NoLogger(module.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_log_errors_only_unless_they_are_named() {
        let logged = |directives: &str| {
            let mut lines = Vec::new();
            let subscriber = tracing_subscriber::registry().with(filter(directives).unwrap());
            tracing::subscriber::with_default(subscriber, || {
                // A line for each PING that nobody awaits, for each TLS alert, and what goes through the `log` crate.
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
    fn levels_change_while_it_runs() {
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
            assert!(matches!(set_level(Some(bad), LevelFilter::INFO), Err(Error::NoLogger(_))), "{bad}");
        }
    }
}
