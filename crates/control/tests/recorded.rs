//! Recorded configurations of istiod, applied by a control plane process. In both forms of discovery, each recorded
//! proxy receives the resources that the model compiles. The tests of the model compare these with the responses of
//! istiod.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests may end the test")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use serde_json::Value;
use skysail_identity::{Issuer, ServiceAccount};
use skysail_model::{Files, ProxyNode, World, api::kube::Locality, compile_for};
use skysail_xds::{
    Kind, Resource, Resources,
    client::{Client, Connection, Form, Options, Update},
    envoy::pb::{envoy::config::core::v3::Node, google::protobuf::value::Kind as Metadata},
    istio::{boolean, list, number, string, structure},
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    sync::watch,
};
use tonic::{
    metadata::MetadataMap,
    transport::{Certificate, ClientTlsConfig, Endpoint},
};

/// Fingerprints of resources, which ignore the order of map entries.
type Versions = BTreeMap<(Kind, String), String>;

/// Folders without configuration of their own: the objects of all recordings, and pushes to a sidecar.
const OTHERS: [&str; 2] = ["00-base", "u-updates"];
/// Files that are not configuration: the status that istiod wrote, and Secrets without their keys.
const NO_CONFIGURATION: [&str; 2] = ["status-after.yaml", "secrets-without-keys.yaml"];

#[tokio::test]
async fn every_recorded_proxy_receives_the_resources_of_the_model() {
    let recordings = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/istiod");
    let scenarios: Vec<PathBuf> =
        files(&recordings, "").into_iter().filter(|of| !ends_with(of, &OTHERS)).collect();
    assert!(scenarios.len() >= 39, "{scenarios:?}");
    for scenario in &scenarios {
        // Copies the objects, because the folders also have recordings, which are not configuration.
        let copy = tempfile::tempdir().unwrap();
        let folders = [&recordings.join("00-base"), scenario].map(|from| {
            let folder = copy.path().join(from.file_name().unwrap());
            fs::create_dir(&folder).unwrap();
            for file in files(from, "yaml").iter().filter(|file| !ends_with(file, &NO_CONFIGURATION)) {
                fs::copy(file, folder.join(file.file_name().unwrap())).unwrap();
            }
            folder
        });
        let world = world(&folders);
        let issuer = Issuer::generate().unwrap();
        fs::write(copy.path().join("token.pem"), issuer.public_pem()).unwrap();
        let (_control, address) = start(copy.path(), &folders).await;
        let root = Certificate::from_pem(fs::read(copy.path().join("root-cert.pem")).unwrap());
        let tls = ClientTlsConfig::new().ca_certificate(root).domain_name("istiod.istio-system.svc");
        let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap().tls_config(tls).unwrap();
        for proxy in files(&scenario.join("xds"), "") {
            let node: Value = serde_json::from_slice(&fs::read(proxy.join("node.json")).unwrap()).unwrap();
            let id = node["id"].as_str().unwrap();
            let mut parsed = ProxyNode::parse(id, node["metadata"].clone(), Locality::default()).unwrap();
            world.identify(&mut parsed, "Kubernetes").unwrap();
            let expected_resources = compile_for(&world, &parsed.view, parsed.hostname()).0;
            for form in [Form::Sotw, Form::Delta] {
                let connection = Connection {
                    channel: endpoint.connect().await.unwrap(),
                    metadata: token(&issuer, &node["metadata"]),
                };
                let place = proxy.display().to_string();
                fetch(connection, (&place, &node), form, &expected_resources).await;
            }
        }
    }
}

fn ends_with(path: &Path, names: &[&str]) -> bool {
    names.iter().any(|name| path.ends_with(name))
}

/// Returns the files in a folder with this extension, sorted.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<_> =
        entries.filter(|path| path.extension().unwrap_or_default() == extension).collect();
    files.sort();
    files
}

fn world(folders: &[PathBuf]) -> World {
    let (mut world, mut read) = (World::new(), Files::new());
    for (layer, folder) in folders.iter().enumerate() {
        for file in files(folder, "yaml") {
            let text = fs::read_to_string(&file).unwrap();
            for change in read.set(layer, &file.display().to_string(), &text) {
                change.apply_to(&mut world);
            }
        }
    }
    world.settle();
    world
}

/// Starts a control plane with its files in `home`. Returns its address.
async fn start(home: &Path, folders: &[PathBuf]) -> (Child, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skysaild"));
    command.args(["--listen", "127.0.0.1", "--tls-port", "0", "--admin-port", "0", "--log-json"]);
    command.arg("--ca-dir").arg(home).arg("--token-key").arg(home.join("token.pem"));
    for folder in folders {
        command.arg("--config").arg(folder);
    }
    let mut child = command.stderr(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut log = BufReader::new(child.stderr.take().unwrap()).lines();
    loop {
        let line = log.next_line().await.unwrap().expect("the control plane ended");
        let line: Value = serde_json::from_str(&line).unwrap();
        if line["fields"]["message"].as_str().is_some_and(|text| text.contains("and certificates")) {
            let address = line["fields"]["address"].as_str().unwrap().to_owned();
            tokio::spawn(async move { while let Ok(Some(_)) = log.next_line().await {} });
            return (child, address);
        }
    }
}

/// Returns the metadata with the token of the service account in a node.
fn token(issuer: &Issuer, metadata: &Value) -> MetadataMap {
    let text = |key: &str| metadata[key].as_str().unwrap().to_owned();
    let account = ServiceAccount { namespace: text("NAMESPACE"), name: text("SERVICE_ACCOUNT"), pod: None };
    let token = issuer.issue(&account, "istio-ca", Duration::from_secs(600)).unwrap();
    let mut metadata = MetadataMap::new();
    metadata.insert("authorization", format!("Bearer {token}").parse().unwrap());
    metadata
}

/// Subscribes as this proxy and asserts that it receives the resources in `expected_resources`.
async fn fetch(
    connection: Connection,
    (place, node): (&str, &Value),
    form: Form,
    expected_resources: &Resources,
) {
    let wildcard = vec![Kind::Cluster, Kind::Listener, Kind::NameTable];
    let fields = |json: &Value| match metadata(json).kind {
        Some(Metadata::StructValue(fields)) => Some(fields),
        _ => None,
    };
    let text = |key: &str| node[key].as_str().unwrap_or_default().to_owned();
    let node = Node {
        id: text("id"),
        cluster: text("cluster"),
        metadata: fields(&node["metadata"]),
        ..Node::default()
    };
    let (client, subscriptions) = Client::new(Options { node, form, wildcard });
    for kind in [Kind::Endpoint, Kind::Route] {
        subscriptions
            .set(kind, expected_resources.iter(kind).map(|resource| resource.name.to_string()).collect());
    }
    let (sender, mut got) = watch::channel(Versions::new());
    let connect = async || {
        let Connection { channel, metadata } = &connection;
        Ok(Connection { channel: channel.clone(), metadata: metadata.clone() })
    };
    let handler = async move |update: Update| {
        sender.send_modify(|versions| {
            for name in update.removed {
                versions.remove(&(update.kind, name));
            }
            versions.extend(update.added.into_iter().map(|received| {
                let resource = Resource::from_body(update.kind, &received.name, received.body);
                ((update.kind, received.name), resource.version_text())
            }));
        });
        Vec::new()
    };
    let expected: Versions = Kind::ALL
        .into_iter()
        .flat_map(|kind| {
            expected_resources.iter(kind).map(move |r| ((kind, r.name.to_string()), r.version_text()))
        })
        .collect();
    tokio::select! {
        never = client.run(connect, handler) => match never {},
        all = got.wait_for(|got| got.len() >= expected.len()) => drop(all.unwrap()),
    }
    let got = got.borrow().clone();
    let names: BTreeSet<&(Kind, String)> = got.keys().chain(expected.keys()).collect();
    let different: Vec<_> = names.into_iter().filter(|name| got.get(name) != expected.get(name)).collect();
    assert!(different.is_empty(), "{form:?}, {place}: {different:?}");
}

fn metadata(json: &Value) -> skysail_xds::envoy::pb::google::protobuf::Value {
    match json {
        Value::Null => skysail_xds::envoy::pb::google::protobuf::Value { kind: Some(Metadata::NullValue(0)) },
        Value::Bool(value) => boolean(*value),
        Value::Number(value) => number(value.as_f64().unwrap()),
        Value::String(text) => string(text.as_str()),
        Value::Array(values) => list(values.iter().map(metadata)),
        Value::Object(fields) => {
            structure(fields.iter().map(|(name, value)| (name.as_str(), metadata(value))))
        }
    }
}
