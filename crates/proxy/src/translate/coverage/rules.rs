//! Validation rules of Envoy's API (`validate.rules`), which a field's value must satisfy.
//!
//! The build script generates the rules from the descriptors. Envoy refuses a resource that violates one of them, and
//! so does the sidecar: a configuration means the same in both.

use std::{
    collections::{HashMap, HashSet},
    sync::{LazyLock, Mutex, PoisonError},
};

use regex::Regex;

/// A rule for the value of a field. Bounds are inclusive unless noted.
pub(super) enum Check {
    /// The message must be set.
    Present,
    /// Range of an integer.
    Int(i64, i64),
    /// Bounds of a number, each with whether the bound itself is excluded.
    Float((f64, bool), (f64, bool)),
    /// Value of a flag.
    Bool(bool),
    /// Range of a length in bytes.
    Bytes(u64, u64),
    /// Range of a length in characters.
    Chars(u64, u64),
    /// Regular expression.
    Pattern(&'static str),
    /// Start of a text.
    Prefix(&'static str),
    /// End of a text.
    Suffix(&'static str),
    /// Allowed texts.
    Text(&'static [&'static str]),
    /// Name of a header; strict: a token as in RFC 9110, section 5.6.2, or with commas or a leading colon.
    HeaderName(bool),
    /// Value of a header; strict: without control characters.
    HeaderValue(bool),
    /// Allowed numbers.
    In(&'static [i64]),
    /// Refused numbers.
    NotIn(&'static [i64]),
    /// Range of the number of elements; the flag allows none.
    Items(u64, u64, bool),
    /// No element occurs twice.
    Unique,
    /// Rules for each element.
    Each(&'static [Self]),
    /// Rules for each key of a map.
    Keys(&'static [Self]),
    /// Range of a duration in nanoseconds.
    Duration(i128, i128),
    /// Rules for values other than zero and the empty text.
    UnlessDefault(&'static [Self]),
}

/// A value in its encoded form.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Wire<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
    Fixed32(u32),
}

impl<'a> Wire<'a> {
    /// Returns the content of a length-delimited value; nothing for others.
    pub(super) fn bytes(self) -> &'a [u8] {
        match self {
            Self::Bytes(bytes) => bytes,
            Self::Varint(_) | Self::Fixed64(_) | Self::Fixed32(_) => &[],
        }
    }

    /// Returns an integer, or that of a wrapper message.
    fn int(self) -> i64 {
        match self {
            Self::Varint(value) => value.cast_signed(),
            Self::Bytes(wrapper) => inner(wrapper, 1).map_or(0, Self::int),
            Self::Fixed64(value) => value.cast_signed(),
            Self::Fixed32(value) => value.into(),
        }
    }

    /// Returns a number, or that of a wrapper message.
    fn float(self) -> f64 {
        match self {
            Self::Fixed64(bits) => f64::from_bits(bits),
            Self::Fixed32(bits) => f32::from_bits(bits).into(),
            Self::Bytes(wrapper) => inner(wrapper, 1).map_or(0.0, Self::float),
            Self::Varint(_) => 0.0,
        }
    }

    fn is_default(self) -> bool {
        match self {
            Self::Bytes(bytes) => bytes.is_empty(),
            other => other.int() == 0,
        }
    }
}

/// Values of a field, in order.
pub(super) struct FieldValues<'a> {
    pub(super) all: Vec<Wire<'a>>,
    /// Value of an absent field; `None` if absence differs from any value.
    pub(super) default: Option<Wire<'a>>,
}

impl<'a> FieldValues<'a> {
    /// Splits packed numbers into single values.
    pub(super) fn unpack(&mut self) {
        let packed = |value: &Wire<'a>| match *value {
            Wire::Bytes(mut bytes) => {
                std::iter::from_fn(move || super::varint(&mut bytes).map(Wire::Varint)).collect()
            }
            other => vec![other],
        };
        self.all = self.all.iter().flat_map(packed).collect();
    }

    /// Calls a function with each violation: the index of the element if one violates it, and the reason.
    pub(super) fn verify(&self, checks: &[Check], mut violated: impl FnMut(Option<usize>, String)) {
        for check in checks {
            match check {
                Check::Present if self.all.is_empty() => violated(None, "must be set".to_owned()),
                Check::Present => {}
                Check::Items(min, max, may_be_empty) => {
                    let count = self.all.len() as u64;
                    if !(*may_be_empty && count == 0)
                        && let Some(reason) = outside(count, *min, *max, "element")
                    {
                        violated(None, reason);
                    }
                }
                Check::Unique => {
                    let mut seen = HashSet::new();
                    if let Some(index) = self.all.iter().position(|value| !seen.insert(*value)) {
                        violated(Some(index), "occurs twice".to_owned());
                    }
                }
                Check::Each(inner) => {
                    for (index, value) in self.all.iter().enumerate() {
                        inner.iter().filter_map(|check| reason(check, *value)).for_each(|reason| {
                            violated(Some(index), reason);
                        });
                    }
                }
                Check::Keys(checks) => {
                    for value in &self.all {
                        let key = inner(value.bytes(), 1).unwrap_or(Wire::Bytes(&[]));
                        checks.iter().filter_map(|check| reason(check, key)).for_each(|reason| {
                            violated(None, format!("a key {reason}"));
                        });
                    }
                }
                check => {
                    if let Some(value) = self.all.last().copied().or(self.default)
                        && let Some(reason) = reason(check, value)
                    {
                        violated(None, reason);
                    }
                }
            }
        }
    }
}

/// Returns why a value violates a rule.
fn reason(check: &Check, value: Wire<'_>) -> Option<String> {
    let unless = |holds: bool, reason: String| (!holds).then_some(reason);
    let text = || std::str::from_utf8(value.bytes()).unwrap_or_default();
    match check {
        Check::Int(min, max) => {
            let number = value.int();
            unless((*min..=*max).contains(&number), range(number, *min, *max))
        }
        Check::Float((min, above), (max, below)) => {
            let number = value.float();
            let holds = if *above { number > *min } else { number >= *min }
                && if *below { number < *max } else { number <= *max };
            unless(holds, format!("{number} is out of the range from {min} to {max}"))
        }
        Check::Bool(wanted) => unless((value.int() != 0) == *wanted, format!("must be {wanted}")),
        Check::Bytes(min, max) => outside(value.bytes().len() as u64, *min, *max, "byte"),
        Check::Chars(min, max) => outside(text().chars().count() as u64, *min, *max, "character"),
        Check::Pattern(pattern) => {
            unless(matches(pattern, text()), format!("{:?} does not match {pattern:?}", text()))
        }
        Check::Prefix(prefix) => unless(text().starts_with(prefix), format!("must start with {prefix:?}")),
        Check::Suffix(suffix) => unless(text().ends_with(suffix), format!("must end with {suffix:?}")),
        Check::Text(allowed) => unless(allowed.contains(&text()), format!("must be one of {allowed:?}")),
        Check::HeaderName(strict) => {
            let bytes = value.bytes();
            let name = bytes.strip_prefix(b":").filter(|_| *strict).unwrap_or(bytes);
            let valid = name.iter().all(|byte| if *strict { is_token(*byte) } else { is_no_line_end(*byte) });
            unless(
                valid && !(*strict && name.is_empty()),
                format!("{:?} is not the name of a header", text()),
            )
        }
        Check::HeaderValue(strict) => {
            let valid = |byte: u8| {
                if *strict { byte == b'\t' || !byte.is_ascii_control() } else { is_no_line_end(byte) }
            };
            unless(
                value.bytes().iter().all(|byte| valid(*byte)),
                format!("{:?} contains control characters", text()),
            )
        }
        Check::In(allowed) => {
            unless(allowed.contains(&value.int()), format!("{} is not a known value", value.int()))
        }
        Check::NotIn(refused) => {
            unless(!refused.contains(&value.int()), format!("must not be {}", value.int()))
        }
        Check::Duration(min, max) => {
            let part = |number| inner(value.bytes(), number).map_or(0, |part| i128::from(part.int()));
            let nanos = part(1).saturating_mul(1_000_000_000).saturating_add(part(2));
            match (nanos < *min, nanos > *max) {
                (true, _) => Some(format!("must be at least {}", seconds(*min))),
                (_, true) => Some(format!("must be at most {}", seconds(*max))),
                _ => None,
            }
        }
        Check::UnlessDefault(_) if value.is_default() => None,
        Check::UnlessDefault(inner) => inner.iter().find_map(|check| reason(check, value)),
        Check::Present | Check::Items(..) | Check::Unique | Check::Each(_) | Check::Keys(_) => None,
    }
}

/// Returns why a number is not in a range.
fn range(number: i64, min: i64, max: i64) -> String {
    if number < min { format!("must be at least {min}") } else { format!("must be at most {max}") }
}

/// Returns why a count is not in a range.
fn outside(count: u64, min: u64, max: u64, what: &str) -> Option<String> {
    match () {
        () if count == 0 && min == 1 => Some("must not be empty".to_owned()),
        () if count < min => Some(format!("must have at least {min} {what}s")),
        () if count > max => Some(format!("must have at most {max} {what}s")),
        () => None,
    }
}

fn seconds(nanos: i128) -> String {
    match nanos {
        1 => "1ns, more than 0".to_owned(),
        nanos if nanos % 1_000_000_000 == 0 => format!("{}s", nanos / 1_000_000_000),
        nanos if nanos % 1_000_000 == 0 => format!("{}ms", nanos / 1_000_000),
        nanos => format!("{nanos}ns"),
    }
}

/// Returns whether a byte is in protoc-gen-validate's expression for strict names of headers. It also allows commas.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+,-.^_|~`".contains(&byte)
}

fn is_no_line_end(byte: u8) -> bool {
    !matches!(byte, b'\0' | b'\n' | b'\r')
}

/// Returns whether a text matches a pattern of the API. Each is compiled once.
fn matches(pattern: &'static str, text: &str) -> bool {
    static COMPILED: LazyLock<Mutex<HashMap<&str, Option<Regex>>>> = LazyLock::new(Mutex::default);
    let mut compiled = COMPILED.lock().unwrap_or_else(PoisonError::into_inner);
    let regex = compiled.entry(pattern).or_insert_with(|| Regex::new(pattern).ok());
    regex.as_ref().is_none_or(|regex| regex.is_match(text))
}

/// Returns the last value of a field of a message.
fn inner(mut message: &[u8], number: u32) -> Option<Wire<'_>> {
    let mut found = None;
    while let Some((other, value)) = super::next(&mut message) {
        if other == number {
            found = Some(value);
        }
    }
    found
}
