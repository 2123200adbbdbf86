//! Reduces Envoy's descriptors to what the sidecar needs, and generates the table of supported fields.
//!
//! The descriptors are in the sources of the `envoy-types` crate, not in its API, so `cargo metadata` finds the
//! sources. The script generates `descriptors.bin`, for the child process that converts between JSON and
//! protos, and `fields.rs`. The latter contains the names of all fields of the messages in
//! `src/translate/supported.txt` with their support. A misspelt name in that file fails the build.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    env,
    fmt::Write as _,
    fs,
    path::PathBuf,
};

use prost::Message as _;
use prost_types::{
    DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet,
    field_descriptor_proto::Label, field_descriptor_proto::Type,
};
use skysail_descriptors::{Result, envoy_file, field, file, is_annotation, istio_files, message, strip};

#[path = "build/rules.rs"]
mod rules;

use rules::Rules;

/// Messages whose JSON form is needed although none of their fields is translated.
const JSON_ONLY: &[&str] = &[
    "envoy.admin.v3.ConfigDump",
    "envoy.admin.v3.SecretsConfigDump",
    "envoy.extensions.filters.network.mongo_proxy.v3.MongoProxy",
    "envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
    "envoy.extensions.http.header_formatters.preserve_case.v3.PreserveCaseFormatterConfig",
    "envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
];

fn main() -> Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build/rules.rs");
    println!("cargo::rerun-if-changed=src/translate/supported.txt");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let source = envoy_file()?;
    println!("cargo::rerun-if-changed={}", source.display());
    let descriptors = fs::read(&source)?;
    let mut set = FileDescriptorSet::decode(descriptors.as_slice())?;
    let rules = Rules::decode(&descriptors)?;
    set.file.extend(istio_files());
    set.file.push(peak_ewma());
    let supported = fs::read_to_string("src/translate/supported.txt")?;
    let supported = parse_supported(&supported)?;
    let messages = messages(&set);
    fs::write(out.join("fields.rs"), field_table(&supported, &messages, &enums(&set), &rules)?)?;
    let roots = supported.iter().map(|(name, _)| name.as_str()).chain(JSON_ONLY.iter().copied());
    let trimmed = trim(&set, roots, &messages)?;
    fs::write(out.join("descriptors.bin"), trimmed.encode_to_vec())?;
    Ok(())
}

/// Support for a field.
#[derive(Clone, Copy, PartialEq)]
enum Mark {
    Done,
    WithoutEffect,
    Warned,
}

type Supported = Vec<(String, BTreeMap<String, Mark>)>;

/// Parses `supported.txt`: a line begins with a message's name; its fields are in indented lines. `=` precedes
/// those without effect, `?` those that log a warning.
fn parse_supported(text: &str) -> Result<Supported> {
    let mut supported = Supported::new();
    for line in text.lines().map(|line| line.split('#').next().unwrap_or_default()) {
        if line.trim().is_empty() {
            continue;
        }
        if !line.starts_with(' ') {
            supported.push((line.trim().to_owned(), BTreeMap::new()));
            continue;
        }
        let (_, fields) = supported.last_mut().ok_or("a field before the first message")?;
        let mut mark = Mark::Done;
        for word in line.split_whitespace() {
            match word {
                "=" => mark = Mark::WithoutEffect,
                "?" => mark = Mark::Warned,
                name => {
                    fields.insert(name.to_owned(), mark);
                }
            }
        }
    }
    Ok(supported)
}

/// Returns all messages by full name, with their files.
fn messages(set: &FileDescriptorSet) -> HashMap<String, (&FileDescriptorProto, &DescriptorProto)> {
    let mut all = HashMap::new();
    for file in &set.file {
        let mut open: Vec<_> =
            file.message_type.iter().map(|message| (file.package().to_owned(), message)).collect();
        while let Some((scope, message)) = open.pop() {
            let name = format!("{scope}.{}", message.name());
            open.extend(message.nested_type.iter().map(|nested| (name.clone(), nested)));
            all.insert(name, (file, message));
        }
    }
    all
}

type Messages<'a> = HashMap<String, (&'a FileDescriptorProto, &'a DescriptorProto)>;

/// Returns all enums by full name.
fn enums(set: &FileDescriptorSet) -> Enums<'_> {
    let mut all = HashMap::new();
    for file in &set.file {
        let scope = |name: &str| format!("{}.{name}", file.package());
        all.extend(file.enum_type.iter().map(|one| (scope(one.name()), one)));
        let mut open: Vec<_> =
            file.message_type.iter().map(|message| (scope(message.name()), message)).collect();
        while let Some((scope, message)) = open.pop() {
            open.extend(
                message.nested_type.iter().map(|nested| (format!("{scope}.{}", nested.name()), nested)),
            );
            all.extend(message.enum_type.iter().map(|one| (format!("{scope}.{}", one.name()), one)));
        }
    }
    all
}

type Enums<'a> = HashMap<String, &'a prost_types::EnumDescriptorProto>;

/// Returns the `Json` of a field in the table, as Rust code.
fn json(
    field: &FieldDescriptorProto,
    mark: Option<Mark>,
    index: &HashMap<&str, usize>,
    messages: &Messages<'_>,
    enums: &Enums<'_>,
) -> Result<String> {
    let name = field.type_name().trim_start_matches('.');
    let is_wrapper =
        name.starts_with("google.protobuf.") && (name.ends_with("Value") || name.ends_with("Duration"));
    // Of messages without effect, only wrappers and durations are kept, because validation rules may apply to them.
    if mark == Some(Mark::WithoutEffect) && field.r#type() == Type::Message {
        return Ok(match name.strip_prefix("google.protobuf.").filter(|_| is_wrapper) {
            Some(known) => format!("Json::WellKnown({known:?})"),
            None => "Json::Ignored".into(),
        });
    }
    Ok(match field.r#type() {
        Type::Bool => "Json::Bool".into(),
        Type::Int32 | Type::Int64 => "Json::Int".into(),
        Type::Uint32 | Type::Uint64 => "Json::Uint".into(),
        Type::Float => "Json::Float".into(),
        Type::Double => "Json::Double".into(),
        Type::String => "Json::String".into(),
        Type::Bytes => "Json::Bytes".into(),
        Type::Enum => {
            let name = field.type_name().trim_start_matches('.');
            let declared = enums.get(name).ok_or_else(|| format!("there is no enum {name}"))?;
            let values: Vec<_> = declared
                .value
                .iter()
                .map(|value| format!("({:?}, {})", value.name(), value.number()))
                .collect();
            format!("Json::Enum(&[{}])", values.join(", "))
        }
        Type::Message if mark == Some(Mark::Done) => {
            let name = field.type_name().trim_start_matches('.');
            if let Some(known) = name.strip_prefix("google.protobuf.") {
                return Ok(format!("Json::WellKnown({known:?})"));
            }
            if let Some((_, entry)) = messages.get(name)
                && entry.options.as_ref().is_some_and(prost_types::MessageOptions::map_entry)
            {
                let part = |name| entry.field.iter().find(|field| field.name() == name);
                let (Some(key), Some(value)) = (part("key"), part("value")) else {
                    return Err("a map without keys and values".into());
                };
                let key = json(key, mark, index, messages, enums)?;
                return Ok(format!("Json::Map(&{key}, &{})", json(value, mark, index, messages, enums)?));
            }
            let index = index.get(name).ok_or_else(|| format!("supported.txt does not list {name}"))?;
            format!("Json::Message({index})")
        }
        _ => "Json::Other".into(),
    })
}

fn field_table(
    supported: &Supported,
    messages: &Messages<'_>,
    enums: &Enums<'_>,
    rules: &Rules,
) -> Result<String> {
    let index: HashMap<&str, usize> =
        supported.iter().enumerate().map(|(index, (name, _))| (name.as_str(), index)).collect();
    if index.len() != supported.len() {
        return Err("supported.txt lists a message twice".into());
    }
    let mut code = String::from("static MESSAGES: &[Message] = &[\n");
    for (name, fields) in supported {
        let (_, message) =
            messages.get(name).ok_or_else(|| format!("supported.txt: there is no message {name}"))?;
        let known: BTreeSet<&str> = message.field.iter().map(FieldDescriptorProto::name).collect();
        if let Some(wrong) = fields.keys().find(|field| !known.contains(field.as_str())) {
            return Err(format!("supported.txt: {name} has no field {wrong}").into());
        }
        writeln!(code, "    Message {{ name: {name:?}, fields: &[")?;
        for field in &message.field {
            let rule = match fields.get(field.name()) {
                None => "Rule::Refused".to_owned(),
                Some(Mark::WithoutEffect) => "Rule::Done".to_owned(),
                Some(Mark::Warned) => "Rule::Warned".to_owned(),
                Some(Mark::Done) => {
                    done(field, &index, messages).map_err(|error| format!("{name}: {error}"))?
                }
            };
            let repeated = field.label() == Label::Repeated;
            let mark = fields.get(field.name()).copied();
            let json = json(field, mark, &index, messages, enums)?;
            let values: Vec<i32> = enums
                .get(field.type_name().trim_start_matches('.'))
                .map(|declared| declared.value.iter().map(|value| value.number()).collect())
                .unwrap_or_default();
            let (checks, kind) = (rules.field(name, field, &values)?, kind(field));
            let (number, field) = (field.number(), field.name());
            writeln!(
                code,
                "        ProtoField {{ number: {number}, name: {field:?}, repeated: {repeated}, rule: {rule}, \
                 json: {json}, kind: FieldKind::{kind}, checks: {checks} }},"
            )?;
        }
        writeln!(code, "    ], oneofs: &[{}] }},", oneofs(message, &rules.oneofs(name)))?;
    }
    code.push_str("];\n");
    Ok(code)
}

/// Returns the name of the field's `FieldKind`.
fn kind(field: &FieldDescriptorProto) -> &'static str {
    let is_text = matches!(field.r#type(), Type::String | Type::Bytes);
    match field.label() {
        Label::Repeated if is_text || field.r#type() == Type::Message => "Optional",
        Label::Repeated => "Numbers",
        _ if field.oneof_index.is_some() || field.r#type() == Type::Message => "Optional",
        _ if is_text => "Text",
        _ => "Number",
    }
}

/// Returns the required oneofs of a message with the numbers of their fields. `all` are its oneofs in order.
fn oneofs(message: &DescriptorProto, all: &[(&str, bool)]) -> String {
    let mut code = String::new();
    for (index, (name, _)) in all.iter().enumerate().filter(|(_, (_, required))| *required) {
        let fields = message.field.iter().filter(|field| field.oneof_index == i32::try_from(index).ok());
        let numbers: Vec<_> = fields.map(FieldDescriptorProto::number).collect();
        _ = write!(code, "({name:?}, &{numbers:?}), ");
    }
    code
}

/// Returns the rule for a translated field: messages are checked field by field, well-known types as a whole.
fn done(
    field: &FieldDescriptorProto,
    index: &HashMap<&str, usize>,
    messages: &Messages<'_>,
) -> Result<String> {
    if field.r#type() != Type::Message {
        return Ok("Rule::Done".into());
    }
    let name = field.type_name().trim_start_matches('.');
    if name == "google.protobuf.Any" {
        return Ok("Rule::Any".into());
    }
    if name.starts_with("google.protobuf.") {
        return Ok("Rule::Done".into());
    }
    if let Some((_, entry)) = messages.get(name)
        && entry.options.as_ref().is_some_and(prost_types::MessageOptions::map_entry)
    {
        let value = entry.field.iter().find(|field| field.name() == "value").ok_or("a map without values")?;
        let inner = done(value, index, messages)?;
        return Ok(match inner.strip_prefix("Rule::Within(").and_then(|rest| rest.strip_suffix(')')) {
            Some(index) => format!("Rule::MapOf({index})"),
            None if inner == "Rule::Any" => "Rule::MapOfAny".into(),
            None => inner,
        });
    }
    let index = index.get(name).ok_or_else(|| {
        format!("supported.txt does not list message {name}, the type of field {}", field.name())
    })?;
    Ok(format!("Rule::Within({index})"))
}

/// Returns the files of the roots with all their imports, without options for other languages.
fn trim<'a>(
    set: &FileDescriptorSet,
    roots: impl Iterator<Item = &'a str>,
    messages: &Messages<'_>,
) -> Result<FileDescriptorSet> {
    let files: HashMap<&str, &FileDescriptorProto> =
        set.file.iter().map(|file| (file.name(), file)).collect();
    let mut wanted = BTreeSet::new();
    let mut open = Vec::new();
    for root in roots {
        let (file, _) = messages.get(root).ok_or_else(|| format!("there is no message {root}"))?;
        open.push(file.name());
    }
    while let Some(name) = open.pop() {
        if wanted.insert(name) {
            let file = files.get(name).ok_or_else(|| format!("the descriptors lack {name}"))?;
            open.extend(file.dependency.iter().map(String::as_str).filter(|name| !is_annotation(name)));
        }
    }
    let file = set.file.iter().filter(|file| wanted.contains(file.name())).cloned().map(strip).collect();
    Ok(FileDescriptorSet { file })
}

/// Returns the messages of the load balancer `peak_ewma`, which Envoy's API does not contain yet.
fn peak_ewma() -> FileDescriptorProto {
    let duration = |name, number| field(name, number, Type::Message, ".google.protobuf.Duration");
    let wrapped =
        |name, number, kind| field(name, number, Type::Message, &format!(".google.protobuf.{kind}Value"));
    let peak_ewma = message(
        "PeakEwma",
        vec![
            duration("decay_time", 1),
            duration("aggregation_interval", 2),
            wrapped("max_samples_per_host", 3, "UInt32"),
            duration("default_rtt", 4),
            wrapped("penalty_value", 5, "Double"),
        ],
    );
    file(
        "envoy.extensions.load_balancing_policies.peak_ewma.v3alpha",
        &["google/protobuf/duration.proto", "google/protobuf/wrappers.proto"],
        vec![peak_ewma],
    )
}
