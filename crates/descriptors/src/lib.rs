//! Descriptors of Envoy's messages, for build scripts: finds them, strips them, and adds messages that they lack.
//!
//! The descriptors are in the sources of the `envoy-types` crate, not in its API, so `cargo metadata` finds the
//! sources.

use std::{
    env,
    error::Error,
    path::{Path, PathBuf},
    process::Command,
};

use prost_types::{
    DescriptorProto, EnumDescriptorProto, EnumOptions, FieldDescriptorProto, FileDescriptorProto,
    MessageOptions,
    field_descriptor_proto::{Label, Type},
};

/// Result of a build script.
pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Returns the file with the descriptors in the sources of `envoy-types`, wherever Cargo finds them: in a registry or
/// vendored. Must be called by a build script.
///
/// # Errors
/// `cargo metadata` fails or does not list the crate.
pub fn envoy_file() -> Result<PathBuf> {
    let manifest = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join("Cargo.toml");
    let target = env::var("TARGET")?;
    let mut failure = String::new();
    // Offline first: the dependencies of this build are already downloaded. If `cargo metadata` needs other packages,
    // the second attempt downloads them.
    for offline in [true, false] {
        let mut command = Command::new(env::var("CARGO")?);
        command.args(["metadata", "--format-version", "1", "--filter-platform", &target, "--manifest-path"]);
        command.arg(&manifest).args(offline.then_some("--offline"));
        let output = command.output()?;
        if !output.status.success() {
            failure = String::from_utf8_lossy(&output.stderr).into_owned();
            continue;
        }
        let metadata: serde_json::Value = serde_json::from_slice(&output.stdout)?;
        let packages = metadata["packages"].as_array().into_iter().flatten();
        let found = packages.into_iter().find(|package| package["name"] == "envoy-types");
        let manifest = found.and_then(|package| package["manifest_path"].as_str());
        let folder = manifest.and_then(|path| Path::new(path).parent());
        let folder = folder.ok_or("cargo metadata names no package envoy-types")?;
        return Ok(folder.join("src/generated/types.bin"));
    }
    Err(format!("Envoy's descriptors cannot be found, as cargo metadata failed: {failure}").into())
}

/// Returns whether a file is imported only for its options.
pub fn is_annotation(file: &str) -> bool {
    file.starts_with("validate/")
        || file.contains("/annotations/")
        || file == "google/protobuf/descriptor.proto"
}

/// Removes services, extensions and comments from a file, the imports of files that define options, and all options
/// but `map_entry` and `allow_alias`.
pub fn strip(mut file: FileDescriptorProto) -> FileDescriptorProto {
    file.dependency.retain(|name| !is_annotation(name));
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
    declared.options =
        options.map(|options| EnumOptions { allow_alias: options.allow_alias, ..Default::default() });
    declared.value.iter_mut().for_each(|value| value.options = None);
}

/// Returns files with the messages that Istio sends and Envoy's API does not contain, and with xDS's `TypedStruct`.
pub fn istio_files() -> Vec<FileDescriptorProto> {
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

/// Returns a file of a package with these messages.
pub fn file(package: &str, imports: &[&str], message_type: Vec<DescriptorProto>) -> FileDescriptorProto {
    FileDescriptorProto {
        name: Some(format!("skysail/{package}.proto")),
        package: Some(package.to_owned()),
        dependency: imports.iter().map(|&import| import.to_owned()).collect(),
        message_type,
        syntax: Some("proto3".to_owned()),
        ..Default::default()
    }
}

/// Returns a message with these fields.
pub fn message(name: &str, field: Vec<FieldDescriptorProto>) -> DescriptorProto {
    DescriptorProto { name: Some(name.to_owned()), field, ..Default::default() }
}

/// Returns an optional field; `type_name` is the type of a message, with a leading dot.
pub fn field(name: &str, number: i32, kind: Type, type_name: &str) -> FieldDescriptorProto {
    FieldDescriptorProto {
        name: Some(name.to_owned()),
        number: Some(number),
        label: Some(Label::Optional.into()),
        r#type: Some(kind.into()),
        type_name: (!type_name.is_empty()).then(|| type_name.to_owned()),
        ..Default::default()
    }
}

/// Makes a field repeated.
fn repeated(mut field: FieldDescriptorProto) -> FieldDescriptorProto {
    field.label = Some(Label::Repeated.into());
    field
}
