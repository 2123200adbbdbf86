//! Durations as Go writes them: `1.5s`, `250ms`, `1h30m`.

use std::time::Duration;

/// Parses a duration as Go's `time.ParseDuration` does, but refuses negative ones.
pub(crate) fn parse(text: &str) -> Option<Duration> {
    let mut rest = text.strip_prefix('+').unwrap_or(text);
    if rest == "0" {
        return Some(Duration::ZERO);
    }
    let mut total = Duration::ZERO;
    let mut any = false;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let number: f64 = rest[..digits].parse().ok()?;
        rest = &rest[digits..];
        let unit = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let seconds = match &rest[..unit] {
            "ns" => 1e-9,
            "us" | "µs" | "μs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return None,
        };
        // Rounded, because 0.001 * 50 is not exactly 0.05.
        let nanos = (number * seconds * 1e9).round();
        total = total.checked_add(Duration::try_from_secs_f64(nanos / 1e9).ok()?)?;
        rest = &rest[unit..];
        any = true;
    }
    any.then_some(total)
}
