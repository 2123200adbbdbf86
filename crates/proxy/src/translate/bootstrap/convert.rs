//! Envoy's files as protos, and protos as JSON, in a child process.
//!
//! That takes Envoy's descriptors, which cost tens of megabytes once they are loaded. A sidecar therefore starts
//! itself again for a moment with `--convert`, gives the child one form and takes the other.

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

/// Largest configuration dumped or read.
const MAX_BYTES: u64 = 1 << 30;

/// What the child does, as it stands behind `--convert`.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum Conversion {
    /// An Envoy bootstrap, YAML or JSON, to its encoded form.
    Bootstrap,
    /// A node, JSON, to its encoded form.
    Node,
    /// A file of discovery, YAML or JSON, to its encoded form.
    Discovery,
    /// An encoded `envoy.admin.v3.ConfigDump` to JSON without private keys.
    ConfigDump,
}

/// The child's work: standard input to standard output.
pub(crate) fn child(conversion: Conversion) -> anyhow::Result<()> {
    let mut input = Vec::new();
    std::io::stdin().take(MAX_BYTES).read_to_end(&mut input)?;
    let output = convert(conversion, &input)?;
    std::io::stdout().write_all(&output)?;
    Ok(())
}

/// Converts by way of a child process.
pub(crate) fn convert_in_child(conversion: Conversion, input: Vec<u8>) -> anyhow::Result<Vec<u8>> {
    // The file may have been replaced since; a program that only simulates this one does not know the other name.
    let own = std::env::current_exe().ok().filter(|file| file.exists());
    let mut command = Command::new(own.unwrap_or_else(|| "/proc/self/exe".into()));
    let mut own = std::env::args_os();
    command.arg0(own.next().unwrap_or_else(|| "skysail-proxy".into()));
    // Inside the binary that is all programs the words before the first option say that it is to be the proxy.
    command.args(own.take_while(|word| !is_option(word)));
    let word = match conversion {
        Conversion::Bootstrap => "bootstrap",
        Conversion::Node => "node",
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
    // A thread, since the child may answer before it has read everything.
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
        Conversion::Node => to_proto(&pool, "envoy.config.core.v3.Node", input),
        Conversion::Discovery => to_proto(&pool, "envoy.service.discovery.v3.DiscoveryResponse", input),
        Conversion::ConfigDump => to_json(&pool, "envoy.admin.v3.ConfigDump", input),
    }
}

/// The only document of a YAML text.
fn yaml(text: &str) -> anyhow::Result<Value> {
    let mut documents = skysail_yaml::documents(text);
    let document = documents.next().context("the file is empty")?;
    let root = document.root.context("the file is not valid YAML")?;
    if let Some((path, line, first)) = document.duplicates.first() {
        bail!("line {line}: {path} stands here a second time; the first is on line {first}");
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
            Some(name) => bail!("{}: skysail-proxy does not support {name}: take it out", track.path()),
            None => bail!("{}: {error}: correct the field or take it out", track.path()),
        },
    }
}

/// The name of a type that the descriptors lack, from the words prost-reflect has for it.
fn unknown_type(error: &str) -> Option<&str> {
    error.strip_prefix("message '")?.split_once("' not found").map(|(name, _)| name)
}

fn to_json(pool: &DescriptorPool, message: &str, input: &[u8]) -> anyhow::Result<Vec<u8>> {
    let descriptor = pool.get_message_by_name(message).context("the built-in descriptors lack a message")?;
    let mut message = DynamicMessage::decode(descriptor, input)?;
    name_unknown(pool, &mut message)?;
    // Field names as in the protos, as Envoy's admin page has them.
    let options = SerializeOptions::new().use_proto_field_name(true).stringify_64_bit_integers(true);
    let mut value = message.serialize_with_options(serde_json::value::Serializer, &options)?;
    redact(&mut value);
    Ok(serde_json::to_vec(&value)?)
}

/// What is packed in a type that the descriptors lack is told by its name and its bytes, as one such part must not
/// keep the whole from being seen.
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

/// Takes the content of every private key and password out.
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
    fn yaml_and_json_give_the_same() {
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
    fn what_is_of_unknown_type_hides_nothing_else() {
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
    fn keys_are_taken_out() {
        let mut value = serde_json::json!({"a": [{"private_key": {"inline_string": "secret"}}], "password": {"inline_bytes": "c2VjcmV0"}});
        redact(&mut value);
        let text = value.to_string();
        assert!(!text.contains("secret") && !text.contains("c2Vj"), "{text}");
    }
}
