//! Reads the validation rules of Envoy's API (`validate.rules`) and returns them as code for the field table.
//!
//! Source: `validate/validate.proto` of protoc-gen-validate. The rules are extensions of the descriptors' options,
//! which `prost-types` drops, so the descriptors are decoded a second time with the types below.

use std::{collections::HashMap, fmt::Write as _};

use prost::Message;
use prost_types::FieldDescriptorProto;

use super::Result;

/// Rules of all messages, by full name.
pub(super) struct Rules(HashMap<String, Declared>);

#[derive(Message)]
struct FileSet {
    #[prost(message, repeated, tag = "1")]
    file: Vec<File>,
}

#[derive(Message)]
struct File {
    #[prost(string, tag = "2")]
    package: String,
    #[prost(message, repeated, tag = "4")]
    message_type: Vec<Declared>,
}

#[derive(Clone, Message)]
struct Declared {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, repeated, tag = "2")]
    field: Vec<Field>,
    #[prost(message, repeated, tag = "3")]
    nested: Vec<Self>,
    #[prost(message, repeated, tag = "8")]
    oneof: Vec<Oneof>,
}

#[derive(Clone, Message)]
struct Field {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "8")]
    options: Option<FieldOptions>,
}

#[derive(Clone, Message)]
struct FieldOptions {
    #[prost(message, optional, tag = "1071")]
    rules: Option<FieldRules>,
}

#[derive(Clone, Message)]
struct Oneof {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(message, optional, tag = "2")]
    options: Option<OneofOptions>,
}

#[derive(Clone, Message)]
struct OneofOptions {
    #[prost(bool, tag = "1071")]
    required: bool,
}

/// Rules for one value. Envoy's API uses no other types.
#[derive(Clone, Message)]
struct FieldRules {
    #[prost(message, optional, tag = "1")]
    float: Option<FloatRules>,
    #[prost(message, optional, tag = "2")]
    double: Option<DoubleRules>,
    #[prost(message, optional, tag = "3")]
    int32: Option<IntRules>,
    #[prost(message, optional, tag = "4")]
    int64: Option<IntRules>,
    #[prost(message, optional, tag = "5")]
    uint32: Option<IntRules>,
    #[prost(message, optional, tag = "6")]
    uint64: Option<IntRules>,
    #[prost(message, optional, tag = "13")]
    bool: Option<BoolRules>,
    #[prost(message, optional, tag = "14")]
    string: Option<StringRules>,
    #[prost(message, optional, tag = "15")]
    bytes: Option<BytesRules>,
    #[prost(message, optional, tag = "16")]
    enumeration: Option<EnumRules>,
    #[prost(message, optional, tag = "17")]
    message: Option<MessageRules>,
    #[prost(message, optional, tag = "18")]
    repeated: Option<Box<RepeatedRules>>,
    #[prost(message, optional, tag = "19")]
    map: Option<Box<MapRules>>,
    #[prost(message, optional, tag = "20")]
    any: Option<AnyRules>,
    #[prost(message, optional, tag = "21")]
    duration: Option<DurationRules>,
    #[prost(message, optional, tag = "22")]
    timestamp: Option<AnyRules>,
}

#[derive(Clone, Copy, Message)]
struct FloatRules {
    #[prost(float, optional, tag = "2")]
    lt: Option<f32>,
    #[prost(float, optional, tag = "3")]
    lte: Option<f32>,
    #[prost(float, optional, tag = "4")]
    gt: Option<f32>,
    #[prost(float, optional, tag = "5")]
    gte: Option<f32>,
}

#[derive(Clone, Copy, Message)]
struct DoubleRules {
    #[prost(double, optional, tag = "2")]
    lt: Option<f64>,
    #[prost(double, optional, tag = "3")]
    lte: Option<f64>,
    #[prost(double, optional, tag = "4")]
    gt: Option<f64>,
    #[prost(double, optional, tag = "5")]
    gte: Option<f64>,
}

/// Rules for all integer types, which have the same encoding.
#[derive(Clone, Message)]
struct IntRules {
    #[prost(int64, optional, tag = "2")]
    lt: Option<i64>,
    #[prost(int64, optional, tag = "3")]
    lte: Option<i64>,
    #[prost(int64, optional, tag = "4")]
    gt: Option<i64>,
    #[prost(int64, optional, tag = "5")]
    gte: Option<i64>,
    #[prost(int64, repeated, packed = "false", tag = "6")]
    within: Vec<i64>,
    #[prost(int64, repeated, packed = "false", tag = "7")]
    not_in: Vec<i64>,
    #[prost(bool, tag = "8")]
    ignore_empty: bool,
}

#[derive(Clone, Copy, Message)]
struct BoolRules {
    #[prost(bool, optional, tag = "1")]
    constant: Option<bool>,
}

#[derive(Clone, Message)]
struct StringRules {
    #[prost(uint64, optional, tag = "2")]
    min_len: Option<u64>,
    #[prost(uint64, optional, tag = "3")]
    max_len: Option<u64>,
    #[prost(uint64, optional, tag = "4")]
    min_bytes: Option<u64>,
    #[prost(uint64, optional, tag = "5")]
    max_bytes: Option<u64>,
    #[prost(string, optional, tag = "6")]
    pattern: Option<String>,
    #[prost(string, optional, tag = "7")]
    prefix: Option<String>,
    #[prost(string, optional, tag = "8")]
    suffix: Option<String>,
    #[prost(string, repeated, tag = "10")]
    within: Vec<String>,
    #[prost(bool, tag = "12")]
    email: bool,
    #[prost(bool, tag = "13")]
    hostname: bool,
    #[prost(bool, tag = "14")]
    ip: bool,
    #[prost(bool, tag = "17")]
    uri: bool,
    #[prost(bool, tag = "18")]
    uri_ref: bool,
    #[prost(bool, tag = "21")]
    address: bool,
    #[prost(int32, tag = "24")]
    known_regex: i32,
    #[prost(bool, optional, tag = "25")]
    strict: Option<bool>,
    #[prost(bool, tag = "26")]
    ignore_empty: bool,
}

#[derive(Clone, Copy, Message)]
struct BytesRules {
    #[prost(uint64, optional, tag = "2")]
    min_len: Option<u64>,
    #[prost(uint64, optional, tag = "3")]
    max_len: Option<u64>,
}

#[derive(Clone, Message)]
struct EnumRules {
    #[prost(bool, tag = "2")]
    defined_only: bool,
    #[prost(int64, repeated, packed = "false", tag = "3")]
    within: Vec<i64>,
    #[prost(int64, repeated, packed = "false", tag = "4")]
    not_in: Vec<i64>,
}

#[derive(Clone, Copy, Message)]
struct MessageRules {
    #[prost(bool, tag = "2")]
    required: bool,
}

#[derive(Clone, Message)]
struct RepeatedRules {
    #[prost(uint64, optional, tag = "1")]
    min_items: Option<u64>,
    #[prost(uint64, optional, tag = "2")]
    max_items: Option<u64>,
    #[prost(bool, tag = "3")]
    unique: bool,
    #[prost(message, optional, boxed, tag = "4")]
    items: Option<Box<FieldRules>>,
    #[prost(bool, tag = "5")]
    ignore_empty: bool,
}

#[derive(Clone, Message)]
struct MapRules {
    #[prost(uint64, optional, tag = "1")]
    min_pairs: Option<u64>,
    #[prost(message, optional, boxed, tag = "4")]
    keys: Option<Box<FieldRules>>,
}

#[derive(Clone, Copy, Message)]
struct AnyRules {
    #[prost(bool, tag = "1")]
    required: bool,
}

#[derive(Clone, Copy, Message)]
struct DurationRules {
    #[prost(bool, tag = "1")]
    required: bool,
    #[prost(message, optional, tag = "3")]
    lt: Option<prost_types::Duration>,
    #[prost(message, optional, tag = "4")]
    lte: Option<prost_types::Duration>,
    #[prost(message, optional, tag = "5")]
    gt: Option<prost_types::Duration>,
    #[prost(message, optional, tag = "6")]
    gte: Option<prost_types::Duration>,
}

impl Rules {
    pub(super) fn decode(set: &[u8]) -> Result<Self> {
        let mut all = HashMap::new();
        for file in FileSet::decode(set)?.file {
            let mut open: Vec<_> =
                file.message_type.into_iter().map(|message| (file.package.clone(), message)).collect();
            while let Some((scope, mut message)) = open.pop() {
                let name = format!("{scope}.{}", message.name);
                let nested = std::mem::take(&mut message.nested);
                open.extend(nested.into_iter().map(|nested| (name.clone(), nested)));
                all.insert(name, message);
            }
        }
        Ok(Self(all))
    }

    /// Returns the rules of a field as a list of `Check`. `values` are the values of its enum.
    pub(super) fn field(
        &self,
        message: &str,
        field: &FieldDescriptorProto,
        values: &[i32],
    ) -> Result<String> {
        let declared = self.0.get(message).map(|message| message.field.iter());
        let found = declared.into_iter().flatten().find(|declared| declared.name == field.name());
        let rules = found.and_then(|field| field.options.as_ref()).and_then(|options| options.rules.as_ref());
        match rules {
            None => Ok("&[]".to_owned()),
            Some(rules) => {
                let mut rules = rules.clone();
                // Another field of the oneof may be set instead.
                rules.message = rules.message.filter(|_| field.oneof_index.is_none());
                checks(&rules, values).map_err(|error| format!("{message}.{}: {error}", field.name()).into())
            }
        }
    }

    /// Returns the names of the message's oneofs, and whether one of their fields must be set.
    pub(super) fn oneofs(&self, message: &str) -> Vec<(&str, bool)> {
        let oneofs = self.0.get(message).map(|message| message.oneof.iter());
        let required = |oneof: &Oneof| oneof.options.as_ref().is_some_and(|options| options.required);
        oneofs.into_iter().flatten().map(|oneof| (oneof.name.as_str(), required(oneof))).collect()
    }
}

fn checks(rules: &FieldRules, values: &[i32]) -> Result<String> {
    let mut code = Vec::new();
    let required = rules.message.is_some_and(|rules| rules.required)
        || rules.any.is_some_and(|rules| rules.required)
        || rules.duration.is_some_and(|rules| rules.required)
        || rules.timestamp.is_some_and(|rules| rules.required);
    if required {
        code.push("Check::Present".to_owned());
    }
    if let Some(rules) = rules.float {
        let wide = |bound: Option<f32>| bound.map(f64::from);
        let (lt, lte, gt, gte) = (wide(rules.lt), wide(rules.lte), wide(rules.gt), wide(rules.gte));
        code.push(float(DoubleRules { lt, lte, gt, gte }));
    }
    code.extend(rules.double.map(float));
    for rules in [&rules.int32, &rules.int64, &rules.uint32, &rules.uint64].into_iter().flatten() {
        code.push(int(rules));
    }
    if let Some(constant) = rules.bool.and_then(|rules| rules.constant) {
        code.push(format!("Check::Bool({constant})"));
    }
    if let Some(rules) = &rules.string {
        code.push(string(rules)?);
    }
    if let Some(rules) = rules.bytes {
        code.push(format!("Check::Bytes({}, {})", rules.min_len.unwrap_or(0), max(rules.max_len)));
    }
    if let Some(rules) = &rules.enumeration {
        if rules.defined_only {
            code.push(format!("Check::In(&{values:?})"));
        }
        if !rules.within.is_empty() {
            code.push(format!("Check::In(&{:?})", rules.within));
        }
        if !rules.not_in.is_empty() {
            code.push(format!("Check::NotIn(&{:?})", rules.not_in));
        }
    }
    if let Some(rules) = &rules.repeated {
        let (min, max) = (rules.min_items.unwrap_or(0), max(rules.max_items));
        code.push(format!("Check::Items({min}, {max}, {})", rules.ignore_empty));
        if rules.unique {
            code.push("Check::Unique".to_owned());
        }
        if let Some(items) = &rules.items {
            code.push(format!("Check::Each({})", checks(items, values)?));
        }
    }
    if let Some(rules) = &rules.map {
        code.push(format!("Check::Items({}, u64::MAX, false)", rules.min_pairs.unwrap_or(0)));
        if let Some(keys) = &rules.keys {
            code.push(format!("Check::Keys({})", checks(keys, values)?));
        }
    }
    code.extend(rules.duration.map(duration));
    Ok(format!("&[{}]", code.join(", ")))
}

fn max(bound: Option<u64>) -> String {
    bound.map_or("u64::MAX".to_owned(), |bound| bound.to_string())
}

fn float(rules: DoubleRules) -> String {
    let [lt, lte, gt, gte] =
        [rules.lt, rules.lte, rules.gt, rules.gte].map(|bound| bound.map(|bound| format!("{bound:?}")));
    let min = gt.map(|bound| format!("({bound}, true)")).or(gte.map(|bound| format!("({bound}, false)")));
    let max = lt.map(|bound| format!("({bound}, true)")).or(lte.map(|bound| format!("({bound}, false)")));
    let none = |bound: &str| format!("({bound}, false)");
    format!(
        "Check::Float({}, {})",
        min.unwrap_or_else(|| none("f64::NEG_INFINITY")),
        max.unwrap_or_else(|| none("f64::INFINITY"))
    )
}

fn int(rules: &IntRules) -> String {
    let min = rules.gt.map(|bound| bound + 1).or(rules.gte);
    let max = rules.lt.map(|bound| bound - 1).or(rules.lte);
    let mut checks = vec![format!(
        "Check::Int({}, {})",
        min.map_or("i64::MIN".to_owned(), |bound| bound.to_string()),
        max.map_or("i64::MAX".to_owned(), |bound| bound.to_string())
    )];
    if !rules.within.is_empty() {
        checks.push(format!("Check::In(&{:?})", rules.within));
    }
    if !rules.not_in.is_empty() {
        checks.push(format!("Check::NotIn(&{:?})", rules.not_in));
    }
    match rules.ignore_empty {
        true => format!("Check::UnlessDefault(&[{}])", checks.join(", ")),
        false => checks.join(", "),
    }
}

fn string(rules: &StringRules) -> Result<String> {
    if rules.email || rules.ip {
        return Err("a rule for e-mail or IP addresses needs code here".into());
    }
    let mut checks = Vec::new();
    if rules.min_len.or(rules.max_len).is_some() {
        checks.push(format!("Check::Chars({}, {})", rules.min_len.unwrap_or(0), max(rules.max_len)));
    }
    if rules.min_bytes.or(rules.max_bytes).is_some() {
        checks.push(format!("Check::Bytes({}, {})", rules.min_bytes.unwrap_or(0), max(rules.max_bytes)));
    }
    let texts = [("Pattern", &rules.pattern), ("Prefix", &rules.prefix), ("Suffix", &rules.suffix)];
    for (name, text) in texts {
        if let Some(text) = text {
            checks.push(format!("Check::{name}({text:?})"));
        }
    }
    if !rules.within.is_empty() {
        checks.push(format!("Check::Text(&{:?})", rules.within));
    }
    match rules.known_regex {
        0 => {}
        1 => checks.push(format!("Check::HeaderName({})", rules.strict.unwrap_or(true))),
        2 => checks.push(format!("Check::HeaderValue({})", rules.strict.unwrap_or(true))),
        other => return Err(format!("unknown regular expression {other}").into()),
    }
    // Rules for host names, addresses and URIs are not compiled: Envoy's API has them for fields that no proxy of a
    // mesh receives.
    let mut code = String::new();
    match rules.ignore_empty {
        true => write!(code, "Check::UnlessDefault(&[{}])", checks.join(", "))?,
        false => code.push_str(&checks.join(", ")),
    }
    Ok(code)
}

fn duration(rules: DurationRules) -> String {
    let nanos =
        |time: prost_types::Duration| i128::from(time.seconds) * 1_000_000_000 + i128::from(time.nanos);
    let min = rules.gt.map(|time| nanos(time) + 1).or(rules.gte.map(nanos));
    let max = rules.lt.map(|time| nanos(time) - 1).or(rules.lte.map(nanos));
    format!(
        "Check::Duration({}, {})",
        min.map_or("i128::MIN".to_owned(), |bound| bound.to_string()),
        max.map_or("i128::MAX".to_owned(), |bound| bound.to_string())
    )
}
