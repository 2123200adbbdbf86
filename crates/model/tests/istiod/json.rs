//! Envoy's messages as JSON with packed messages expanded, and the differences between two of them.
//!
//! The descriptors are in the sources of the `envoy-types` crate, not in its API; `cargo metadata` finds them.

use std::{collections::BTreeSet, env, fs, path::Path, process::Command, sync::LazyLock};

use prost::Message as _;
use prost_reflect::{
    DescriptorPool, DynamicMessage, ReflectMessage as _, SerializeOptions, Value as FieldValue,
};
use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumValueDescriptorProto, FieldDescriptorProto,
    FileDescriptorProto, FileDescriptorSet, MessageOptions,
    field_descriptor_proto::{Label, Type},
};
use serde_json::Value;
use skysail_xds::Kind;

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    let source = envoy_types().join("src/generated/types.bin");
    let mut set = FileDescriptorSet::decode(fs::read(source).unwrap().as_slice()).unwrap();
    let has_typed_struct = set.file.iter().any(|file| file.package() == "udpa.type.v1");
    set.file.extend(
        istio_files().into_iter().filter(|file| !has_typed_struct || file.package() != "udpa.type.v1"),
    );
    DescriptorPool::from_file_descriptor_set(set).unwrap()
});

/// Returns a resource's name, its JSON form, and the bytes of everything packed in it.
pub(crate) fn named(kind: Kind, body: &[u8]) -> (String, (Value, BTreeSet<Vec<u8>>)) {
    let message = kind.url().rsplit('/').next().unwrap();
    let descriptor = POOL.get_message_by_name(message).unwrap();
    let message = DynamicMessage::decode(descriptor, body).unwrap();
    let options = SerializeOptions::new().skip_default_fields(true);
    let value = message.serialize_with_options(serde_json::value::Serializer, &options).unwrap();
    let name = value.get("name").or_else(|| value.get("clusterName")).and_then(Value::as_str);
    let name = name.unwrap_or_default().to_owned();
    let mut bytes = BTreeSet::new();
    packed(&message, &mut bytes);
    (name, (value, bytes))
}

/// Collects the bytes of every `Any` of a message, without those nested in them.
fn packed(message: &DynamicMessage, found: &mut BTreeSet<Vec<u8>>) {
    if message.descriptor().full_name() == "google.protobuf.Any" {
        found.insert(message.encode_to_vec());
        return;
    }
    message.fields().for_each(|(_, value)| packed_in(value, found));
}

fn packed_in(value: &FieldValue, found: &mut BTreeSet<Vec<u8>>) {
    match value {
        FieldValue::Message(message) => packed(message, found),
        FieldValue::List(list) => list.iter().for_each(|value| packed_in(value, found)),
        FieldValue::Map(map) => map.values().for_each(|value| packed_in(value, found)),
        _ => {}
    }
}

/// Collects every difference with its path.
pub(crate) fn compare(place: &str, expected: &Value, actual: &Value, differences: &mut Vec<String>) {
    match (expected, actual) {
        (Value::Object(expected), Value::Object(actual)) => {
            for (name, expected) in expected {
                let place = format!("{place}.{name}");
                match actual.get(name) {
                    Some(actual) => compare(&place, expected, actual, differences),
                    None => differences.push(format!("{place}: missing: {expected}")),
                }
            }
            for (name, actual) in actual.iter().filter(|(name, _)| !expected.contains_key(*name)) {
                differences.push(format!("{place}.{name}: istiod does not set it: {actual}"));
            }
        }
        (Value::Array(expected), Value::Array(actual)) if expected.len() == actual.len() => {
            let (expected, actual) = (ordered(place, expected), ordered(place, actual));
            for (index, (expected, actual)) in expected.iter().zip(&actual).enumerate() {
                compare(&format!("{place}[{index}]"), expected, actual, differences);
            }
        }
        _ if expected == actual => {}
        _ => differences.push(format!("{place}: expected {expected}, is {actual}")),
    }
}

/// Sorts lists whose order has no meaning.
fn ordered<'a>(place: &str, list: &'a [Value]) -> Vec<&'a Value> {
    const UNORDERED: [&str; 4] = [".virtualHosts", ".domains", ".matchSubjectAltNames", ".filterChains"];
    let mut list: Vec<_> = list.iter().collect();
    if UNORDERED.iter().any(|name| place.ends_with(name)) {
        list.sort_by_cached_key(|value| match value {
            // Sorts elements next to each other even if they differ further down.
            Value::Object(fields) => format!("{:?}{:?}", fields.get("name"), fields.get("filterChainMatch")),
            other => other.to_string(),
        });
    }
    list
}

fn envoy_types() -> std::path::PathBuf {
    let cargo = env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
    let mut command = Command::new(cargo);
    command
        .args(["metadata", "--format-version", "1", "--locked", "--filter-platform", "host-tuple"])
        .arg("--manifest-path")
        .arg(manifest);
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let package = packages.iter().find(|package| package["name"] == "envoy-types").unwrap();
    Path::new(package["manifest_path"].as_str().unwrap()).parent().unwrap().to_owned()
}

/// Returns descriptors of Istio's messages, as far as the recordings contain them.
fn istio_files() -> Vec<FileDescriptorProto> {
    let text = |name, number| field(name, number, Type::String, "");
    let metric_name = ".stats.PluginConfig.MetricConfig";
    let mut stats = message(
        "PluginConfig",
        vec![
            field("disable_host_header_fallback", 6, Type::Bool, ""),
            field("tcp_reporting_duration", 7, Type::Message, ".google.protobuf.Duration"),
            repeated(field("metrics", 8, Type::Message, metric_name)),
        ],
    );
    let entry_name = format!("{metric_name}.DimensionsEntry");
    let mut metric = message(
        "MetricConfig",
        vec![
            repeated(field("dimensions", 1, Type::Message, &entry_name)),
            text("name", 2),
            repeated(text("tags_to_remove", 3)),
            field("drop", 5, Type::Bool, ""),
        ],
    );
    let mut dimension = message("DimensionsEntry", vec![text("key", 1), text("value", 2)]);
    dimension.options = Some(MessageOptions { map_entry: Some(true), ..Default::default() });
    metric.nested_type.push(dimension);
    stats.nested_type.push(metric);
    let value = field("value", 2, Type::Message, ".google.protobuf.Struct");
    let typed_struct = message("TypedStruct", vec![text("type_url", 1), value]);

    const ALPN: &str = "istio.envoy.config.filter.http.alpn.v2alpha1";
    let alpn_override = message(
        "AlpnOverride",
        vec![
            field("upstream_protocol", 1, Type::Enum, &format!(".{ALPN}.FilterConfig.Protocol")),
            repeated(text("alpn_override", 2)),
        ],
    );
    let values = ["HTTP10", "HTTP11", "HTTP2"].into_iter().zip(0..).map(|(name, number)| {
        EnumValueDescriptorProto { name: Some(name.into()), number: Some(number), ..Default::default() }
    });
    let protocol =
        EnumDescriptorProto { name: Some("Protocol".into()), value: values.collect(), ..Default::default() };
    let overrides = field("alpn_override", 1, Type::Message, &format!(".{ALPN}.FilterConfig.AlpnOverride"));
    let mut alpn = message("FilterConfig", vec![repeated(overrides)]);
    alpn.nested_type.push(alpn_override);
    alpn.enum_type.push(protocol);

    const NDS: &str = "istio.networking.nds.v1";
    let info = message(
        "NameInfo",
        vec![repeated(text("ips", 1)), text("registry", 2), text("shortname", 3), text("namespace", 4)],
    );
    let info_name = format!(".{NDS}.NameTable.NameInfo");
    let mut entry = message("TableEntry", vec![text("key", 1), field("value", 2, Type::Message, &info_name)]);
    entry.options = Some(MessageOptions { map_entry: Some(true), ..Default::default() });
    let table = field("table", 1, Type::Message, &format!(".{NDS}.NameTable.TableEntry"));
    let mut names = message("NameTable", vec![repeated(table)]);
    names.nested_type.extend([info, entry]);

    vec![
        file("stats", &["google/protobuf/duration.proto"], stats),
        file("udpa.type.v1", &["google/protobuf/struct.proto"], typed_struct),
        file(ALPN, &[], alpn),
        file(NDS, &[], names),
    ]
}

fn file(package: &str, imports: &[&str], message: DescriptorProto) -> FileDescriptorProto {
    FileDescriptorProto {
        name: Some(format!("{package}.proto")),
        package: Some(package.into()),
        dependency: imports.iter().map(ToString::to_string).collect(),
        message_type: vec![message],
        syntax: Some("proto3".into()),
        ..Default::default()
    }
}

fn message(name: &str, fields: Vec<FieldDescriptorProto>) -> DescriptorProto {
    DescriptorProto { name: Some(name.into()), field: fields, ..Default::default() }
}

fn field(name: &str, number: i32, kind: Type, type_name: &str) -> FieldDescriptorProto {
    FieldDescriptorProto {
        name: Some(name.into()),
        number: Some(number),
        label: Some(Label::Optional as i32),
        r#type: Some(kind as i32),
        type_name: (!type_name.is_empty()).then(|| type_name.to_owned()),
        ..Default::default()
    }
}

fn repeated(field: FieldDescriptorProto) -> FieldDescriptorProto {
    FieldDescriptorProto { label: Some(Label::Repeated as i32), ..field }
}
