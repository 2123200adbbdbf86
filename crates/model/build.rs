//! Reduces the descriptors of Envoy's messages to what the conversion of `patch.value` of an EnvoyFilter needs.
//!
//! The descriptors are in the sources of the `envoy-types` crate, not in its API, so `cargo metadata` finds the sources.
//! Options, services and annotations are removed. Messages of Istio that Envoy's API does not contain are added.

use std::{
    collections::BTreeSet,
    env,
    error::Error,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use prost::Message as _;
use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet,
    MessageOptions,
    field_descriptor_proto::{Label, Type},
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let source = envoy_types()?.join("src/generated/types.bin");
    println!("cargo::rerun-if-changed={}", source.display());
    let set = FileDescriptorSet::decode(fs::read(&source)?.as_slice())?;
    let declared = |file: &FileDescriptorProto| {
        file.message_type
            .iter()
            .map(|message| format!("{}.{}", file.package(), message.name()))
            .collect::<Vec<_>>()
    };
    let messages: BTreeSet<String> = set.file.iter().flat_map(declared).collect();
    let files = set.file.into_iter().filter(|file| !is_annotation(file.name()));
    let mut files: Vec<FileDescriptorProto> = files.map(strip).collect();
    let is_new = |file: &FileDescriptorProto| !declared(file).iter().any(|name| messages.contains(name));
    files.extend(istio_files().into_iter().filter(is_new));
    let known: BTreeSet<String> = files.iter().map(|file| file.name().to_owned()).collect();
    files.iter_mut().for_each(|file| file.dependency.retain(|name| known.contains(name)));
    fs::write(out.join("descriptors.bin"), FileDescriptorSet { file: files }.encode_to_vec())?;
    Ok(())
}

/// Returns the directory of the `envoy-types` sources, with any registry or vendoring.
fn envoy_types() -> Result<PathBuf> {
    let manifest = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("Cargo.toml");
    let target = env::var("TARGET")?;
    let mut said = String::new();
    // Tries offline first, because the dependencies of this build are downloaded. `cargo metadata` may need more.
    for offline in [true, false] {
        let mut command = Command::new(env::var("CARGO")?);
        command.args(["metadata", "--format-version", "1", "--filter-platform", &target, "--manifest-path"]);
        command.arg(&manifest).args(offline.then_some("--offline"));
        let output = command.output()?;
        if !output.status.success() {
            said = String::from_utf8_lossy(&output.stderr).into_owned();
            continue;
        }
        let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let packages = metadata["packages"].as_array().into_iter().flatten();
        let found = packages.into_iter().find(|package| package["name"] == "envoy-types");
        let manifest = found.and_then(|package| package["manifest_path"].as_str());
        let folder = manifest.and_then(|path| Path::new(path).parent());
        return Ok(folder.ok_or("cargo metadata names no package envoy-types")?.to_owned());
    }
    Err(format!("Envoy's descriptors cannot be found, as cargo metadata failed: {said}").into())
}

fn is_annotation(file: &str) -> bool {
    file.starts_with("validate/")
        || file.contains("/annotations/")
        || file == "google/protobuf/descriptor.proto"
}

fn strip(mut file: FileDescriptorProto) -> FileDescriptorProto {
    file.public_dependency.clear();
    file.weak_dependency.clear();
    file.source_code_info = None;
    file.options = None;
    file.service.clear();
    file.extension.clear();
    file.message_type.iter_mut().for_each(strip_message);
    file.enum_type.iter_mut().for_each(strip_enum);
    file
}

fn strip_message(message: &mut DescriptorProto) {
    message.field.iter_mut().for_each(|field| field.options = None);
    message.oneof_decl.iter_mut().for_each(|oneof| oneof.options = None);
    if let Some(options) = &mut message.options {
        *options = MessageOptions { map_entry: options.map_entry, ..Default::default() };
    }
    message.nested_type.iter_mut().for_each(strip_message);
    message.enum_type.iter_mut().for_each(strip_enum);
}

fn strip_enum(declared: &mut EnumDescriptorProto) {
    let options = declared.options.take();
    declared.options = options
        .map(|options| prost_types::EnumOptions { allow_alias: options.allow_alias, ..Default::default() });
    declared.value.iter_mut().for_each(|value| value.options = None);
}

/// Messages that Istio sends and Envoy's API does not contain, and the typed structs of xDS.
fn istio_files() -> Vec<FileDescriptorProto> {
    let text = |name, number| field(name, number, Type::String, "");
    let number = |name, number| field(name, number, Type::Int32, "");
    let duration = |name, number| field(name, number, Type::Message, ".google.protobuf.Duration");
    let typed_struct = |package: &str| {
        let value = field("value", 2, Type::Message, ".google.protobuf.Struct");
        let message = message("TypedStruct", vec![text("type_url", 1), value]);
        file(package, &["google/protobuf/struct.proto"], vec![message])
    };
    let mut dimension = message("DimensionsEntry", vec![text("key", 1), text("value", 2)]);
    dimension.options = Some(MessageOptions { map_entry: Some(true), ..Default::default() });
    let mut metric = message(
        "MetricConfig",
        vec![
            repeated(field("dimensions", 1, Type::Message, ".stats.MetricConfig.DimensionsEntry")),
            text("name", 2),
            repeated(text("tags_to_remove", 3)),
            text("match", 4),
            field("drop", 5, Type::Bool, ""),
        ],
    );
    metric.nested_type.push(dimension);
    let definition = message("MetricDefinition", vec![text("name", 1), text("value", 2), number("type", 3)]);
    let plugin = message(
        "PluginConfig",
        vec![
            field("disable_host_header_fallback", 6, Type::Bool, ""),
            duration("tcp_reporting_duration", 7),
            repeated(field("metrics", 8, Type::Message, ".stats.MetricConfig")),
            repeated(field("definitions", 9, Type::Message, ".stats.MetricDefinition")),
            number("reporter", 10),
            duration("rotation_interval", 11),
            duration("graceful_deletion_interval", 12),
        ],
    );
    let alpn = "istio.envoy.config.filter.http.alpn.v2alpha1";
    let entry =
        message("AlpnOverride", vec![number("upstream_protocol", 1), repeated(text("alpn_override", 2))]);
    let overrides = repeated(field("alpn_override", 1, Type::Message, &format!(".{alpn}.AlpnOverride")));
    vec![
        typed_struct("udpa.type.v1"),
        typed_struct("xds.type.v3"),
        file("stats", &["google/protobuf/duration.proto"], vec![metric, definition, plugin]),
        file(alpn, &[], vec![entry, message("FilterConfig", vec![overrides])]),
    ]
}

fn file(package: &str, imports: &[&str], message_type: Vec<DescriptorProto>) -> FileDescriptorProto {
    FileDescriptorProto {
        name: Some(format!("skysail/{package}.proto")),
        package: Some(package.to_owned()),
        dependency: imports.iter().map(|&import| import.to_owned()).collect(),
        message_type,
        syntax: Some("proto3".to_owned()),
        ..Default::default()
    }
}

fn message(name: &str, field: Vec<FieldDescriptorProto>) -> DescriptorProto {
    DescriptorProto { name: Some(name.to_owned()), field, ..Default::default() }
}

fn field(name: &str, number: i32, kind: Type, type_name: &str) -> FieldDescriptorProto {
    FieldDescriptorProto {
        name: Some(name.to_owned()),
        number: Some(number),
        label: Some(Label::Optional.into()),
        r#type: Some(kind.into()),
        type_name: (!type_name.is_empty()).then(|| type_name.to_owned()),
        ..Default::default()
    }
}

fn repeated(mut field: FieldDescriptorProto) -> FieldDescriptorProto {
    field.label = Some(Label::Repeated.into());
    field
}
