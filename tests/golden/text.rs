//! Golden texts: resources as YAML, each once, with the workloads that have it.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt::Write as _,
};

use serde_json::Value;
use skysail_xds::Kind;

/// Resources with the workloads that have them.
type Described = BTreeMap<(Kind, String, String), BTreeSet<String>>;

/// Length of a line up to which a list or mapping is written on one line.
const MAX_LINE: usize = 120;
/// Length from which parts that occur several times are written once.
const MIN_SHARED: usize = 150;
/// Number of differing lines that are shown.
const MAX_SHOWN: usize = 12;

/// Returns a text with names in the place of addresses.
pub(crate) fn with_names(text: &str, names: &[(String, String)]) -> String {
    let mut text = text.to_owned();
    for (address, name) in names {
        let mut out = String::new();
        let mut rest = text.as_str();
        while let Some(at) = rest.find(address.as_str()) {
            let after = &rest[at + address.len()..];
            let is_digit = |text: Option<char>| text.is_some_and(|next| next.is_ascii_digit());
            let is_longer = is_digit(after.chars().next()) || is_digit(rest[..at].chars().next_back());
            out.push_str(&rest[..at]);
            out.push_str(if is_longer { address } else { name });
            rest = after;
        }
        out.push_str(rest);
        text = out;
    }
    text
}

/// Returns the text of all resources.
pub(crate) fn whole(all: &Described) -> String {
    let resources = all.iter().map(|((kind, name, value), workloads)| (*kind, name, value, workloads));
    text(resources.collect(), workloads(all).len())
}

/// Returns the text of the resources that are not in `base`, and the names of those that are no more.
pub(crate) fn changes(base: &Described, all: &Described) -> String {
    let new = all.iter().filter(|(key, of)| base.get(*key) != Some(*of));
    let resources: Vec<_> = new.map(|((kind, name, value), of)| (*kind, name, value, of)).collect();
    let names = |of: &Described| -> BTreeSet<(Kind, String)> {
        of.keys().map(|(kind, name, _)| (*kind, name.clone())).collect()
    };
    let mut out = text(resources, workloads(all).len());
    for (kind, name) in names(base).difference(&names(all)) {
        let _ = writeln!(out, "# removed: {kind} {name}");
    }
    out
}

fn workloads(all: &Described) -> BTreeSet<&String> {
    all.values().flatten().collect()
}

fn text(resources: Vec<(Kind, &String, &String, &BTreeSet<String>)>, workloads: usize) -> String {
    let values: Vec<Value> =
        resources.iter().map(|(_, _, value, _)| serde_json::from_str(value).unwrap()).collect();
    let mut counts = HashMap::new();
    values.iter().for_each(|value| count(value, &mut counts));
    let mut shared = BTreeMap::new();
    let mut out = String::new();
    for ((kind, name, _, of), value) in resources.iter().zip(values) {
        let list = || of.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        let of = if of.len() == workloads { "all".to_owned() } else { list() };
        let _ = writeln!(out, "# {of}");
        let value = replaced(value, &counts, &mut shared);
        write(&mut out, 0, &format!("{kind} {name}:"), &value);
    }
    for (name, value) in shared {
        write(&mut out, 0, &format!("{name}:"), &value);
    }
    out
}

/// Counts the occurrences of each long part.
fn count(value: &Value, counts: &mut HashMap<String, usize>) {
    let text = value.to_string();
    if text.len() < MIN_SHARED {
        return;
    }
    let known = counts.entry(text).or_default();
    *known += 1;
    if *known > 1 {
        return;
    }
    match value {
        Value::Object(fields) => fields.values().for_each(|value| count(value, counts)),
        Value::Array(items) => items.iter().for_each(|value| count(value, counts)),
        _ => {}
    }
}

/// Replaces the parts that occur several times by their names.
fn replaced(value: Value, counts: &HashMap<String, usize>, shared: &mut BTreeMap<String, Value>) -> Value {
    let text = value.to_string();
    let is_shared = counts.get(&text).is_some_and(|count| *count > 1);
    let mut inner = |value: Value| replaced(value, counts, shared);
    let value = match value {
        Value::Object(fields) => {
            Value::Object(fields.into_iter().map(|(name, value)| (name, inner(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(inner).collect()),
        other => other,
    };
    if !is_shared {
        return value;
    }
    let name = format!("*{:06x}", fnv(&text) & 0xff_ffff);
    shared.insert(name.clone(), value);
    Value::String(name)
}

/// Returns the FNV-1a hash of a text, which no version of Rust changes.
fn fnv(text: &str) -> u64 {
    text.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Writes a value after a text: on the same line if it fits.
fn write(out: &mut String, indent: usize, before: &str, value: &Value) {
    let space = " ".repeat(indent);
    let line = value.to_string();
    let is_nested = match value {
        Value::Object(fields) => !fields.is_empty(),
        Value::Array(items) => !items.is_empty(),
        _ => false,
    };
    if !is_nested || indent + before.len() + 1 + line.len() <= MAX_LINE {
        let _ = writeln!(out, "{space}{before} {line}");
        return;
    }
    let _ = writeln!(out, "{space}{before}");
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                write(out, indent + 2, &format!("{name}:"), value);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| write(out, indent + 2, "-", item)),
        _ => {}
    }
}

/// Returns the first lines that differ.
pub(crate) fn difference(golden: &str, text: &str) -> String {
    let known: BTreeSet<&str> = golden.lines().collect();
    let now: BTreeSet<&str> = text.lines().collect();
    let gone = golden.lines().filter(|line| !now.contains(line)).map(|line| format!("-{line}"));
    let new = text.lines().filter(|line| !known.contains(line)).map(|line| format!("+{line}"));
    gone.take(MAX_SHOWN).chain(new.take(MAX_SHOWN)).collect::<Vec<_>>().join("\n")
}
