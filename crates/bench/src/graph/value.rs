//! Values of a service graph as texts: sizes, percentages and durations, parsed and written.

use std::time::Duration;

use skysail_load::go;

/// Maximum size of a request or a response in bytes.
const MAX_SIZE: u64 = 1 << 30;
/// Maximum duration of a sleep.
const MAX_SLEEP: Duration = Duration::from_secs(3_600);
/// Letters of the units of sizes, each 1,024 times the one before.
const UNITS: [char; 5] = ['k', 'm', 'g', 't', 'p'];

/// Parses a size such as `128`, `10K`, `1 KB`, `1.5 MiB`. As in isotope, each unit is a power of 1,024.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let invalid = || format!("{text:?} is not a size; write bytes, or a size such as 10K, 1 KB or 1.5 MiB");
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let unit = unit.strip_prefix(' ').unwrap_or(unit).to_ascii_lowercase();
    let unit = unit.strip_suffix('b').unwrap_or(&unit);
    let unit = unit.strip_suffix('i').unwrap_or(unit);
    let mut letters = unit.chars();
    let exponent = match letters.next() {
        None => 0,
        Some(letter) => 1 + UNITS.iter().position(|unit| *unit == letter).ok_or_else(invalid)?,
    };
    if letters.next().is_some() {
        return Err(invalid());
    }
    let number: f64 = number.parse().map_err(|_| invalid())?;
    bounded_size(number * 1_024_f64.powi(i32::try_from(exponent).map_err(|_| invalid())?))
}

/// Checks a number of bytes.
pub(super) fn bounded_size(bytes: f64) -> Result<u64, String> {
    if !(0.0..=MAX_SIZE as f64).contains(&bytes) {
        return Err("a size must be from 0 to 1 GiB".to_owned());
    }
    Ok(bytes as u64)
}

/// Writes a size, as a number if it is no multiple of a unit.
pub(super) fn write_size(bytes: u64) -> String {
    let divides = |shift: u32| bytes > 0 && bytes.trailing_zeros() >= shift;
    match bytes {
        _ if divides(30) => format!("{} GiB", bytes >> 30),
        _ if divides(20) => format!("{} MiB", bytes >> 20),
        _ if divides(10) => format!("{} KiB", bytes >> 10),
        _ => bytes.to_string(),
    }
}

/// Parses a percentage such as `0.1%`.
pub(super) fn percentage(text: &str) -> Result<f64, String> {
    let number = text.strip_suffix('%').and_then(|number| number.trim_end().parse().ok());
    number.filter(|percent| (0.0..=100.0).contains(percent)).ok_or_else(|| {
        format!("{text:?} is not a percentage; write 0% to 100%, such as 0.1%, or a number from 0 to 1")
    })
}

/// Parses a sleep, which is a duration of Go.
pub(super) fn sleep(text: &str) -> Result<Duration, String> {
    let duration = go::duration(text)?;
    if duration > MAX_SLEEP {
        return Err(format!("{text:?} is longer than the maximum of 1h"));
    }
    Ok(duration)
}

/// Writes a duration in the largest unit that divides it.
pub(super) fn write_duration(duration: Duration) -> String {
    let nanoseconds = duration.as_nanos();
    match nanoseconds {
        0 => "0s".to_owned(),
        _ if nanoseconds.is_multiple_of(1_000_000_000) => format!("{}s", nanoseconds / 1_000_000_000),
        _ if nanoseconds.is_multiple_of(1_000_000) => format!("{}ms", nanoseconds / 1_000_000),
        _ if nanoseconds.is_multiple_of(1_000) => format!("{}us", nanoseconds / 1_000),
        _ => format!("{nanoseconds}ns"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("128", 128),
            ("128B", 128),
            ("10K", 10_240),
            ("10k", 10_240),
            ("1 KB", 1_024),
            ("1 KiB", 1_024),
            ("1.5 mb", 1_572_864),
            ("1GiB", 1 << 30),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "KB", "-1", "1 XB", "1 KBB", "1  KB", "1e3", "1.2.3", "2 GiB", "1 TB", "1KK"] {
            assert!(size(text).is_err(), "{text}");
        }
        for bytes in [0, 1, 1_000, 1_024, 1_536, 1 << 20, 3 << 20, 1 << 30] {
            assert_eq!(size(&write_size(bytes)), Ok(bytes));
        }
    }

    #[test]
    fn percentages_have_a_sign() {
        for (text, percent) in [("0%", 0.0), ("0.1%", 0.1), ("5 %", 5.0), ("100%", 100.0)] {
            assert_eq!(percentage(text), Ok(percent), "{text}");
        }
        for text in ["", "%", "5", "-1%", "101%", "NaN%", "x%"] {
            assert!(percentage(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_are_written_in_their_largest_unit() {
        for text in ["0s", "10ms", "1s", "90s", "150us", "1500ms", "7ns"] {
            let duration = sleep(text).unwrap();
            assert_eq!(write_duration(duration), text);
        }
        assert!(sleep("61m").is_err() && sleep("10").is_err());
    }
}
