//! Composition of a log line in text and JSON form, with escaped and truncated values.

use std::{
    fmt::{self, Write},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use serde::{Serialize, Serializer};
use serde_json::Value;
use tracing::{
    Event, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    field::RecordFields,
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::Writer,
        time::{FormatTime as _, SystemTime},
    },
    registry::LookupSpan,
};

/// Maximum length of a value in a log line, in bytes after escaping.
pub const MAX_VALUE_LENGTH: usize = 2_048;

/// Name of the field that holds an event's message.
const MESSAGE: &str = "message";
/// Prefix of the fields that name the source of an event of the `log` crate.
const LOG_CRATE: &str = "log.";

/// Writes a value, escaped and truncated.
pub(super) fn write_escaped(out: &mut dyn Write, value: fmt::Arguments<'_>) -> fmt::Result {
    let mut escaped = Escaped { out, left: MAX_VALUE_LENGTH, cut: 0 };
    escaped.write_fmt(value)?;
    match escaped.cut {
        0 => Ok(()),
        cut => write!(escaped.out, "… ({cut} bytes more)"),
    }
}

/// Writer that escapes text up to a length. It only counts further bytes, so a value of megabytes costs no memory.
struct Escaped<'a> {
    out: &'a mut dyn Write,
    left: usize,
    cut: usize,
}

impl Write for Escaped<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let mut start = 0;
        for (at, c) in text.char_indices() {
            let length = if is_harmless(c) { c.len_utf8() } else { c.escape_default().len() };
            if self.cut > 0 || length > self.left {
                self.out.write_str(&text[start..at])?;
                self.left = 0;
                self.cut += text.len() - at;
                return Ok(());
            }
            self.left -= length;
            if !is_harmless(c) {
                self.out.write_str(&text[start..at])?;
                write!(self.out, "{}", c.escape_default())?;
                start = at + c.len_utf8();
            }
        }
        self.out.write_str(&text[start..])
    }
}

/// Returns whether a character only adds a glyph to a line. The others are controls (Unicode category Cc), line and
/// paragraph separators, marks and overrides of direction (UAX #9, section 2), characters without width, and tags.
fn is_harmless(c: char) -> bool {
    !(c.is_control()
        || matches!(c, '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}'))
}

/// Fields of a text line: the message, then `name=value`.
pub(super) struct Text;

impl<'writer> FormatFields<'writer> for Text {
    fn format_fields<R: RecordFields>(&self, writer: Writer<'writer>, fields: R) -> fmt::Result {
        let mut line = TextLine { writer, empty: true, written: Ok(()) };
        fields.record(&mut line);
        line.written
    }
}

struct TextLine<'writer> {
    writer: Writer<'writer>,
    empty: bool,
    written: fmt::Result,
}

impl TextLine<'_> {
    fn write(&mut self, name: &str, value: &dyn fmt::Debug) -> fmt::Result {
        if !std::mem::take(&mut self.empty) {
            self.writer.write_char(' ')?;
        }
        if name != MESSAGE {
            write!(self.writer, "{}=", name.strip_prefix("r#").unwrap_or(name))?;
        }
        write_escaped(&mut self.writer, format_args!("{value:?}"))
    }
}

impl Visit for TextLine<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if self.written.is_ok() && !field.name().starts_with(LOG_CRATE) {
            self.written = self.write(field.name(), value);
        }
    }
}

/// JSON line for log collectors: an object with `timestamp`, `level`, `fields` and `target`.
pub(super) struct Json;

impl<S, N> FormatEvent<S, N> for Json
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut timestamp = String::new();
        SystemTime.format_time(&mut Writer::new(&mut timestamp))?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        let metadata = event.metadata();
        let level = metadata.level().as_str();
        let line = JsonLine { timestamp, level, fields, target: metadata.target() };
        let line = serde_json::to_string(&line).map_err(|_| fmt::Error)?;
        writeln!(writer, "{line}")
    }
}

#[derive(Serialize)]
struct JsonLine<'a> {
    timestamp: String,
    level: &'a str,
    fields: Fields,
    target: &'a str,
}

/// Fields of an event in their order.
#[derive(Default)]
struct Fields(Vec<(&'static str, Value)>);

impl Fields {
    fn add(&mut self, field: &Field, value: impl Into<Value>) {
        let name = field.name();
        if !name.starts_with(LOG_CRATE) {
            self.0.push((name.strip_prefix("r#").unwrap_or(name), value.into()));
        }
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

impl Visit for Fields {
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, super::printable(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.add(field, super::printable(format_args!("{value:?}")));
    }
}

/// Rate limit of log lines that a peer can cause: at most one per interval.
#[derive(Debug)]
pub struct Throttle {
    interval: Duration,
    state: Mutex<(Option<Instant>, u64)>,
}

impl Throttle {
    /// Creates a throttle that admits one event per interval.
    pub const fn new(interval: Duration) -> Self {
        Self { interval, state: Mutex::new((None, 0)) }
    }

    /// Returns the number of events suppressed since the last logged one if this event is to be logged, `None`
    /// otherwise.
    pub fn admit(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (last, suppressed) = &mut *state;
        if last.is_some_and(|last| now.saturating_duration_since(last) < self.interval) {
            *suppressed += 1;
            return None;
        }
        *last = Some(now);
        Some(std::mem::take(suppressed))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tracing_subscriber::{fmt, layer::SubscriberExt as _};

    use super::*;
    use crate::logging::printable;

    /// A line break and a forged line, an escape sequence of terminals, an override of direction, a separator.
    const HOSTILE: &str = "pod\n{\"level\":\"INFO\"}\r\x1b[2J\u{9b}31m\u{202e}gnp.exe\u{2028}\0";

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl Sink {
        fn taken(&self) -> String {
            String::from_utf8(std::mem::take(&mut self.0.lock().unwrap())).unwrap()
        }
    }

    fn log(id: &str) {
        let error = std::io::Error::other(id.to_owned());
        tracing::info!(proxy = id, %error, cause = ?error, count = 3, ok = true, "refused {id}");
    }

    /// Returns the text and the JSON form of a line with this value.
    fn lines(id: &str) -> [String; 2] {
        let sink = Sink::default();
        let writer = sink.clone();
        let layer = fmt::layer().with_ansi(false).with_writer(move || writer.clone()).fmt_fields(Text);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || log(id));
        let text = sink.taken();
        let writer = sink.clone();
        let layer = fmt::layer().with_writer(move || writer.clone()).fmt_fields(Text).event_format(Json);
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || log(id));
        [text, sink.taken()]
    }

    #[test]
    fn values_from_outside_stay_in_their_line() {
        for line in lines(HOSTILE) {
            let line = line.strip_suffix('\n').unwrap();
            assert!(line.chars().all(is_harmless), "{line:?}");
            assert!(line.contains("gnp.exe") && line.contains("202e"), "{line:?}");
        }
        let [text, json] = lines("reviews-1.default");
        assert!(text.ends_with(
            "refused reviews-1.default proxy=\"reviews-1.default\" error=reviews-1.default cause=Custom { kind: Other, error: \"reviews-1.default\" } count=3 ok=true\n"
        ), "{text}");
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["level"], "INFO");
        assert_eq!(json["target"], "skysail_core::logging::values::tests");
        let fields = &json["fields"];
        assert_eq!(
            (&fields["message"], &fields["proxy"]),
            (&"refused reviews-1.default".into(), &"reviews-1.default".into())
        );
        assert_eq!((fields["count"].as_i64(), fields["ok"].as_bool()), (Some(3), Some(true)));
    }

    #[test]
    fn a_value_of_a_megabyte_is_truncated_in_every_field() {
        for unit in ["x", "ü", "\n", "\u{202e}"] {
            let id = unit.repeat((1 << 20) / unit.len());
            for line in lines(&id) {
                assert!(line.len() < 8 * MAX_VALUE_LENGTH, "{} bytes", line.len());
                assert!(line.contains("bytes more)"), "{line}");
                assert_eq!(line.matches('\n').count(), 1);
            }
        }
        let exact = "x".repeat(MAX_VALUE_LENGTH);
        assert_eq!(printable(&exact), exact);
        assert_eq!(printable(format!("{exact}é")), format!("{exact}… (2 bytes more)"));
        assert_eq!(printable("Größe 5 µs 漢字"), "Größe 5 µs 漢字");
    }

    #[test]
    fn a_throttle_admits_one_event_per_interval() {
        let throttle = Throttle::new(Duration::from_secs(1));
        let start = Instant::now();
        let at = |millis| throttle.admit(start + Duration::from_millis(millis));
        assert_eq!(
            [at(0), at(10), at(999), at(1000), at(1001), at(2500)],
            [Some(0), None, None, Some(2), None, Some(1)]
        );
    }
}
