//! Forms of Go's command lines: flags with one dash (`-qps 1000`, `-jitter=true`), and durations (`1m30s`).

use std::{ffi::OsString, time::Duration};

use clap::Command;

/// Adds the second dash to the long flags of a command and its subcommands: `-qps` becomes `--qps`. Everything after
/// `--` stays unchanged.
pub(crate) fn double_dashes(arguments: Vec<OsString>, command: &Command) -> Vec<OsString> {
    let is_long = |name: &str| {
        name.len() > 1
            && std::iter::once(command)
                .chain(command.get_subcommands())
                .flat_map(Command::get_arguments)
                .any(|known| known.get_long().is_some_and(|long| long == name))
    };
    let mut ended = false;
    let convert = |argument: OsString| {
        let Some(text) = argument.to_str() else { return argument };
        ended |= text == "--";
        let Some(name) = text.strip_prefix('-').filter(|_| !ended) else { return argument };
        if is_long(name.split('=').next().unwrap_or(name)) { format!("-{text}").into() } else { argument }
    };
    arguments.into_iter().map(convert).collect()
}

/// Parses a duration as Go does: numbers with units, as in `1m30s` or `1.5ms`; `0` needs no unit.
///
/// # Errors
/// The text is not a duration; the message says so.
pub fn duration(text: &str) -> Result<Duration, String> {
    const UNITS: [(&str, f64); 8] = [
        ("ns", 1e-9),
        ("us", 1e-6),
        ("µs", 1e-6),
        ("μs", 1e-6),
        ("ms", 1e-3),
        ("s", 1.0),
        ("m", 60.0),
        ("h", 3_600.0),
    ];
    let invalid = || format!("{text:?} is not a duration, such as 5s, 1m30s or 250ms");
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let (mut rest, mut seconds) = (text, 0.0);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(invalid)?;
        let number: f64 = rest[..digits].parse().map_err(|_| invalid())?;
        rest = &rest[digits..];
        let end = rest.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(rest.len());
        let (_, unit) = UNITS.iter().find(|(name, _)| *name == &rest[..end]).ok_or_else(invalid)?;
        seconds += number * unit;
        rest = &rest[end..];
    }
    if text.is_empty() { Err(invalid()) } else { Duration::try_from_secs_f64(seconds).map_err(|_| invalid()) }
}

#[cfg(test)]
mod tests {
    use clap::Arg;

    use super::*;

    #[test]
    fn long_flags_may_have_one_dash() {
        let command = Command::new("load").args([
            Arg::new("qps").long("qps"),
            Arg::new("connections").short('c'),
            Arg::new("h2").long("h2"),
        ]);
        let line = "-qps=5 -c 4 --qps 1 -h2 -H -other x -- -qps";
        let given = line.split(' ').map(OsString::from).collect();
        let expected = "--qps=5 -c 4 --qps 1 --h2 -H -other x -- -qps";
        assert_eq!(
            double_dashes(given, &command),
            expected.split(' ').map(OsString::from).collect::<Vec<_>>()
        );
    }

    #[test]
    fn durations_are_those_of_go() {
        for (text, expected) in [
            ("5s", Duration::from_secs(5)),
            ("1m30s", Duration::from_secs(90)),
            ("250ms", Duration::from_millis(250)),
            ("150us", Duration::from_micros(150)),
            ("1.5h", Duration::from_secs(5_400)),
            ("0", Duration::ZERO),
        ] {
            assert_eq!(duration(text), Ok(expected), "{text}");
        }
        for text in ["", "5", "s", "5x", "-5s", "1e3s", "99999999999999999999h"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
