//! Converts Envoy's files to protos, and protos to JSON, in a child process.
//!
//! The conversion needs Envoy's descriptors, which take tens of megabytes of memory. The sidecar therefore runs
//! itself with `--convert` for a moment, and passes input and output through pipes.

use std::{
    ffi::OsString,
    io::{Read as _, Write as _},
    os::unix::process::CommandExt as _,
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail, ensure};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use prost::Message as _;
use prost_reflect::{
    DescriptorPool, DeserializeOptions, DynamicMessage, ReflectMessage as _, SerializeOptions, Value as Field,
};
use serde_json::Value;
use skysail_xds::{
    envoy::pb::google::protobuf::{self, Any},
    istio::TypedStruct,
};

static DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// Maximum size of a configuration file or dump, in bytes.
const MAX_BYTES: u64 = 1 << 30;

/// Conversions of the child, as values of `--convert`.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Conversion {
    /// An Envoy bootstrap, YAML or JSON, to its encoded form.
    Bootstrap,
    /// A discovery file, YAML or JSON, to its encoded form.
    Discovery,
    /// An encoded `envoy.admin.v3.ConfigDump` to JSON without private keys.
    ConfigDump,
}

/// Runs the conversion in the child: standard input to standard output.
pub(crate) fn child(conversion: Conversion) -> anyhow::Result<()> {
    let mut input = Vec::new();
    std::io::stdin().take(MAX_BYTES).read_to_end(&mut input)?;
    let output = convert(conversion, &input)?;
    std::io::stdout().write_all(&output)?;
    Ok(())
}

/// Converts in a child process.
pub(crate) fn convert_in_child(conversion: Conversion, input: Vec<u8>) -> anyhow::Result<Vec<u8>> {
    // The path comes first, because an emulator that runs this program does not provide `/proc/self/exe`. The path no
    // longer exists if the executable has been replaced.
    let own = std::env::current_exe().ok().filter(|file| file.exists());
    let mut command = Command::new(own.unwrap_or_else(|| "/proc/self/exe".into()));
    let mut own = std::env::args_os();
    command.arg0(own.next().unwrap_or_else(|| "skysail-proxy".into()));
    // In the combined binary, the words before the first option select the proxy.
    command.args(own.take_while(|word| !is_option(word)));
    let word = match conversion {
        Conversion::Bootstrap => "bootstrap",
        Conversion::Discovery => "discovery",
        Conversion::ConfigDump => "config-dump",
    };
    command.args(["--convert", word]);
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("cannot start the process that converts configuration")?;
    let mut stdin = child.stdin.take().context("the converting process has no standard input")?;
    // A separate thread, because the child may write before it has read everything.
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let output = child.wait_with_output().context("the converting process failed")?;
    let _ = writer.join();
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        bail!("{}", reason.trim());
    }
    Ok(output.stdout)
}

fn is_option(word: &OsString) -> bool {
    word.as_encoded_bytes().starts_with(b"-")
}

/// Converts in this process.
pub(crate) fn convert(conversion: Conversion, input: &[u8]) -> anyhow::Result<Vec<u8>> {
    let pool = DescriptorPool::decode(DESCRIPTORS).context("the built-in descriptors are broken")?;
    match conversion {
        Conversion::Bootstrap => to_proto(&pool, "envoy.config.bootstrap.v3.Bootstrap", input),
        Conversion::Discovery => to_proto(&pool, "envoy.service.discovery.v3.DiscoveryResponse", input),
        Conversion::ConfigDump => to_json(&pool, "envoy.admin.v3.ConfigDump", input),
    }
}

/// Encodes the JSON of an `envoy.admin.v3.ConfigDump` in this process.
pub(crate) fn config_dump(json: &[u8]) -> anyhow::Result<Vec<u8>> {
    let pool = DescriptorPool::decode(DESCRIPTORS).context("the built-in descriptors are broken")?;
    to_proto(&pool, "envoy.admin.v3.ConfigDump", json)
}

/// Returns the only document of a YAML text.
fn yaml(text: &str) -> anyhow::Result<Value> {
    let mut documents = skysail_yaml::documents(text);
    let document = documents.next().context("the file is empty")?;
    let root = document.root.context("the file is not valid YAML")?;
    if let Some((path, line, first)) = document.duplicates.first() {
        bail!("line {line}: duplicate key {path}; the first is on line {first}");
    }
    ensure!(documents.next().is_none(), "the file has more than one YAML document");
    Ok(root.to_json())
}

fn to_proto(pool: &DescriptorPool, message: &str, input: &[u8]) -> anyhow::Result<Vec<u8>> {
    let text = std::str::from_utf8(input).context("the file is not UTF-8")?;
    let value: Value = if text.trim_start().starts_with('{') {
        serde_json::from_str(text).context("the file is not valid JSON")?
    } else {
        yaml(text)?
    };
    let descriptor = pool.get_message_by_name(message).context("the built-in descriptors lack a message")?;
    let options = DeserializeOptions::new().deny_unknown_fields(true);
    let mut track = serde_path_to_error::Track::new();
    let deserializer = serde_path_to_error::Deserializer::new(value, &mut track);
    match DynamicMessage::deserialize_with_options(descriptor, deserializer, &options) {
        Ok(message) => Ok(message.encode_to_vec()),
        Err(error) => match unknown_type(&error.to_string()) {
            Some(name) => bail!("{}: skysail-proxy does not support {name}: remove it", track.path()),
            None => bail!("{}: {error}: correct the field or remove it", track.path()),
        },
    }
}

/// Returns the type name in prost-reflect's error for a type without a descriptor.
fn unknown_type(error: &str) -> Option<&str> {
    error.strip_prefix("message '")?.split_once("' not found").map(|(name, _)| name)
}

fn to_json(pool: &DescriptorPool, message: &str, input: &[u8]) -> anyhow::Result<Vec<u8>> {
    let descriptor = pool.get_message_by_name(message).context("the built-in descriptors lack a message")?;
    let mut message = DynamicMessage::decode(descriptor, input)?;
    name_unknown(pool, &mut message)?;
    // Field names are those of the protos, as on Envoy's admin page.
    let options = SerializeOptions::new().use_proto_field_name(true).stringify_64_bit_integers(true);
    let mut value = message.serialize_with_options(serde_json::value::Serializer, &options)?;
    redact(&mut value);
    Ok(serde_json::to_vec(&value)?)
}

/// Replaces an `Any` of a type without a descriptor by its type name and bytes, so that it does not prevent the
/// dump of everything else.
fn name_unknown(pool: &DescriptorPool, message: &mut DynamicMessage) -> anyhow::Result<()> {
    if message.descriptor().full_name() != "google.protobuf.Any" {
        return message.fields_mut().try_for_each(|(_, value)| match value {
            Field::Message(message) => name_unknown(pool, message),
            Field::List(items) => {
                items.iter_mut().filter_map(Field::as_message_mut).try_for_each(|it| name_unknown(pool, it))
            }
            Field::Map(items) => {
                items.values_mut().filter_map(Field::as_message_mut).try_for_each(|it| name_unknown(pool, it))
            }
            _ => Ok(()),
        });
    }
    let any: Any = message.transcode_to()?;
    if any.type_url.is_empty() {
        return Ok(());
    }
    let name = any.type_url.rsplit('/').next().unwrap_or_default();
    let packed = match pool.get_message_by_name(name) {
        Some(descriptor) => {
            let mut inner = DynamicMessage::decode(descriptor, &*any.value)?;
            name_unknown(pool, &mut inner)?;
            Any { value: inner.encode_to_vec(), ..any }
        }
        None => {
            let bytes = protobuf::value::Kind::StringValue(BASE64_STANDARD.encode(&any.value));
            let bytes = protobuf::Value { kind: Some(bytes) };
            let value = Some(protobuf::Struct { fields: [("value".to_owned(), bytes)].into() });
            let known = TypedStruct { type_url: any.type_url, value };
            Any {
                type_url: "type.googleapis.com/udpa.type.v1.TypedStruct".to_owned(),
                value: known.encode_to_vec(),
            }
        }
    };
    Ok(message.transcode_from(&packed)?)
}

/// Redacts private keys, passwords, session ticket keys and generic secrets.
fn redact(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                if matches!(
                    name.as_str(),
                    "private_key" | "password" | "session_ticket_keys" | "generic_secret"
                ) {
                    blank(field);
                } else {
                    redact(field);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(redact),
        _ => {}
    }
}

fn blank(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                match name.as_str() {
                    // Base64 of "[redacted]".
                    "inline_bytes" => *field = "W3JlZGFjdGVkXQ==".into(),
                    "inline_string" => *field = "[redacted]".into(),
                    _ => blank(field),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(blank),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use skysail_xds::envoy::pb::envoy::{
        admin::v3::{ClustersConfigDump, ConfigDump, clusters_config_dump::DynamicCluster},
        config::cluster::v3::Cluster,
    };

    use super::*;

    #[test]
    fn yaml_and_json_have_the_same_result() {
        let yaml = b"node: {id: a, cluster: b}\nadmin:\n  address:\n    socket_address: {address: 127.0.0.1, port_value: 15000}\n";
        let json = br#"{"node":{"id":"a","cluster":"b"},"admin":{"address":{"socketAddress":{"address":"127.0.0.1","portValue":15000}}}}"#;
        let (yaml, json) = (convert(Conversion::Bootstrap, yaml), convert(Conversion::Bootstrap, json));
        assert_eq!(yaml.unwrap(), json.unwrap());
    }

    #[test]
    fn errors_name_the_field() {
        let yaml = b"static_resources:\n  clusters:\n  - name: a\n    conect_timeout: 1s\n";
        let error = convert(Conversion::Bootstrap, yaml).unwrap_err().to_string();
        assert!(error.starts_with("static_resources.clusters[0]"), "{error}");
        assert!(error.contains("conect_timeout"), "{error}");
        let yaml = b"static_resources:\n  clusters:\n  - name: a\n    connect_timeout: soon\n";
        let error = convert(Conversion::Bootstrap, yaml).unwrap_err().to_string();
        assert!(error.contains("static_resources.clusters[0].connect_timeout"), "{error}");
    }

    #[test]
    fn an_unknown_type_does_not_prevent_the_dump() {
        let any = |name: &str, value| Any { type_url: format!("type.googleapis.com/{name}"), value };
        let unknown = any("some.Type", b"abc".to_vec());
        let cluster = Cluster {
            name: "a".into(),
            typed_extension_protocol_options: [("b".to_owned(), unknown)].into(),
            ..Cluster::default()
        };
        let cluster = Some(any("envoy.config.cluster.v3.Cluster", cluster.encode_to_vec()));
        let cluster = DynamicCluster { cluster, ..DynamicCluster::default() };
        let clusters = ClustersConfigDump { dynamic_active_clusters: vec![cluster], ..Default::default() };
        let clusters = any("envoy.admin.v3.ClustersConfigDump", clusters.encode_to_vec());
        let dump = ConfigDump { configs: vec![clusters] }.encode_to_vec();
        let json: Value = serde_json::from_slice(&convert(Conversion::ConfigDump, &dump).unwrap()).unwrap();
        let cluster = &json["configs"][0]["dynamic_active_clusters"][0]["cluster"];
        assert_eq!(cluster["name"], "a");
        let unknown = &cluster["typed_extension_protocol_options"]["b"];
        assert_eq!(unknown["type_url"], "type.googleapis.com/some.Type");
        assert_eq!(unknown["value"]["value"], "YWJj");
    }

    #[test]
    fn private_keys_are_redacted() {
        let mut value = serde_json::json!({"a": [{"private_key": {"inline_string": "secret"}}], "password": {"inline_bytes": "c2VjcmV0"}});
        redact(&mut value);
        let text = value.to_string();
        assert!(!text.contains("secret") && !text.contains("c2Vj"), "{text}");
    }
}
