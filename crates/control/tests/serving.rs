//! A control plane process: certificates and discovery as proxies use them, changed files, refusals, limits, restarts.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests may end the test")]

mod support;

use std::{
    collections::BTreeMap,
    fs,
    sync::{Arc, Mutex},
    time::Duration,
};

use serde_json::Value;
use skysail_core::SpiffeId;
use skysail_identity::KeyAndCsr;
use skysail_xds::{
    Kind,
    certificates::create_certificate,
    client::{Client, Connection, Form, Options, Received, Rejection, Update},
    envoy::pb::envoy::config::core::v3::Node,
    istio::{IstioCertificateRequest, string, structure},
};
use support::{Control, Folder, bearer, certificate, certificate_by, connect, endpoint};
use tokio::{net::TcpStream, sync::watch, task::JoinHandle};
use tonic::{
    Status,
    metadata::MetadataMap,
    transport::{Channel, Endpoint},
};

fn node(account: &str, cluster: &str) -> Node {
    let fields = [
        ("SERVICE_ACCOUNT", string(account)),
        ("NAMESPACE", string("default")),
        ("CLUSTER_ID", string(cluster)),
    ];
    let metadata = match structure(fields).kind {
        Some(skysail_xds::envoy::pb::google::protobuf::value::Kind::StructValue(fields)) => Some(fields),
        _ => None,
    };
    let id = "sidecar~10.0.0.1~client-1.default~default.svc.cluster.local".into();
    Node { id, metadata, ..Node::default() }
}

/// A proxy that records its clusters, and rejects those whose names contain `refuses`.
struct Proxy {
    clusters: watch::Receiver<BTreeMap<String, Received>>,
    connected: watch::Receiver<bool>,
    /// Names of all deleted clusters.
    removals: Arc<Mutex<Vec<String>>>,
    task: JoinHandle<()>,
}

fn proxy(endpoint: Endpoint, account: &str, refuses: &str) -> Proxy {
    proxy_of(endpoint, node(account, "Kubernetes"), refuses)
}

fn proxy_of(endpoint: Endpoint, node: Node, refuses: &str) -> Proxy {
    let options = Options { node, form: Form::Delta, wildcard: vec![Kind::Cluster] };
    let (client, subscriptions) = Client::new(options);
    let connected = subscriptions.connected();
    let (sender, clusters) = watch::channel(BTreeMap::new());
    let connect = async move || Ok(Connection::new(endpoint.connect().await?));
    let refuses = refuses.to_owned();
    let removals = Arc::new(Mutex::new(Vec::new()));
    let removed = Arc::clone(&removals);
    let handler = async move |update: Update| {
        removed.lock().unwrap().extend(update.removed.iter().cloned());
        keep(&sender, &refuses, update)
    };
    let task = tokio::spawn(async move {
        client.run(connect, handler).await;
    });
    Proxy { clusters, connected, removals, task }
}

fn keep(sender: &watch::Sender<BTreeMap<String, Received>>, refuses: &str, update: Update) -> Vec<Rejection> {
    let refused = |resource: &Received| !refuses.is_empty() && resource.name.contains(refuses);
    let (bad, good): (Vec<_>, Vec<_>) = update.added.into_iter().partition(refused);
    sender.send_modify(|clusters| {
        for name in &update.removed {
            clusters.remove(name);
        }
        clusters.extend(good.into_iter().map(|resource| (resource.name.clone(), resource)));
    });
    bad.into_iter().map(|r| Rejection { name: r.name, reason: "not this one".into() }).collect()
}

impl Proxy {
    async fn until(&mut self, has: &[&str], lacks: &[&str]) {
        let name = |service: &str| format!("outbound|80||{service}.default.svc.cluster.local");
        self.clusters
            .wait_for(|clusters| {
                has.iter().all(|service| clusters.contains_key(&name(service)))
                    && !lacks.iter().any(|service| clusters.contains_key(&name(service)))
            })
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_proxy_receives_a_certificate_its_configuration_and_changes() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    let control = folder.start("0").await;
    assert_eq!(control.page("/ready").await, "ready\n");
    for line in control.page("/").await.lines() {
        // Each listed page exists. That of one proxy asks for its name.
        let (status, body) = control.ask("GET", line.split_whitespace().next().unwrap()).await;
        assert!(status == 200 || status == 400 && body.contains("proxyID"), "{line}: {status} {body}");
    }

    let (tls, identity) = certificate(&control, &folder, "client").await;
    assert_eq!(identity.peer.spiffe, Some(SpiffeId::new("cluster.local", "default", "client")));
    let lifetime = identity.not_after.duration_since(std::time::SystemTime::now()).unwrap();
    assert!(lifetime <= Duration::from_secs(24 * 3600), "the requested lifetime is above the limit");

    let mut proxy = proxy(endpoint(&control.tls, tls), "client", "");
    proxy.until(&["reviews"], &["ratings"]).await;
    folder.service("ratings", 2);
    proxy.until(&["reviews", "ratings"], &[]).await;
    // An invalid file deletes nothing and is reported.
    fs::write(folder.at("config").join("reviews.yaml"), "kind: [").unwrap();
    folder.service("details", 3);
    proxy.until(&["reviews", "ratings", "details"], &[]).await;
    let errors = control.page("/debug/config_errors").await;
    assert!(errors.contains("reviews.yaml"), "{errors}");
    fs::remove_file(folder.at("config").join("ratings.yaml")).unwrap();
    proxy.until(&["reviews", "details"], &["ratings"]).await;
    proxy.task.abort();
    control.terminate().await;
}

#[tokio::test]
async fn a_rejected_resource_appears_in_log_metrics_and_status() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    folder.service("ratings", 2);
    let mut control = folder.start("0").await;
    let (tls, _) = certificate(&control, &folder, "client").await;
    let mut proxy = proxy(endpoint(&control.tls, tls), "client", "ratings");
    proxy.until(&["reviews"], &["ratings"]).await;
    let line = control.logged("proxy rejected its configuration").await;
    assert!(line["reason"].as_str().unwrap().contains("not this one"), "{line}");
    let status: Value = serde_json::from_str(&control.page("/debug/syncz").await).unwrap();
    assert_eq!(status[0]["identity"], "spiffe://cluster.local/ns/default/sa/client");
    let clusters = &status[0]["types"]["cds"];
    assert_eq!((clusters["synced"].as_bool(), clusters["nacked"].as_u64()), (Some(false), Some(1)));
    assert!(clusters["error"].as_str().unwrap().contains("not this one"));
    assert!(control.page("/metrics").await.contains("pilot_total_xds_rejects{type=\"cds\"} 1\n"));
    proxy.task.abort();
}

#[tokio::test]
async fn a_client_without_the_right_credential_is_refused() {
    let folder = Folder::new();
    let mut control = folder.start("0").await;
    let (tls, _) = certificate(&control, &folder, "other").await;
    let proxy = proxy(endpoint(&control.tls, tls), "client", "");
    let line = control.logged("discovery refused").await;
    assert!(line["reason"].as_str().unwrap().contains("sa/other may not receive"), "{line}");
    proxy.task.abort();

    let csr = KeyAndCsr::generate(None).unwrap().csr_pem;
    let request = IstioCertificateRequest { csr, ..IstioCertificateRequest::default() };
    let channel = connect(&control, &folder).await;
    let nobody = create_certificate(channel.clone(), MetadataMap::new(), request.clone()).await.unwrap_err();
    assert_eq!(nobody.code(), tonic::Code::Unauthenticated);
    let forged = Folder::new().token("client");
    let forger = create_certificate(channel, bearer(&forged), request).await.unwrap_err();
    assert_eq!(forger.code(), tonic::Code::Unauthenticated);
    let metrics = control.page("/metrics").await;
    assert!(metrics.contains("citadel_server_success_cert_issuance_count 1\n"), "{metrics}");
    assert!(metrics.contains("citadel_server_authentication_failure_count 2\n"), "{metrics}");
}

#[tokio::test]
async fn the_number_of_scopes_per_identity_is_limited() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    let mut control = folder.start_with("0", &["--max-scopes-per-identity", "2"]).await;
    let (tls, _) = certificate(&control, &folder, "client").await;
    let in_cluster = |cluster| proxy_of(endpoint(&control.tls, tls.clone()), node("client", cluster), "");
    let proxies = ["one", "two", "three"].map(in_cluster);
    let line = control.logged("proxies refused by a limit of scopes or views").await;
    assert_eq!(line["identity"], "spiffe://cluster.local/ns/default/sa/client");
    assert!(line["reason"].as_str().unwrap().contains("--max-scopes-per-identity"), "{line}");
    let metrics = control.page("/metrics").await;
    assert!(metrics.contains("skysail_xds_scopes 2\n"), "{metrics}");
    assert!(!metrics.contains("skysail_xds_scope_refusals{limit=\"identity\"} 0\n"), "{metrics}");
    // Other identities are not affected.
    let (tls, _) = certificate(&control, &folder, "other").await;
    let mut other = proxy(endpoint(&control.tls, tls), "other", "");
    other.until(&["reviews"], &[]).await;
    other.task.abort();
    proxies.iter().for_each(|proxy| proxy.task.abort());
}

/// Requests a certificate on a new connection, and leaves the connection open.
async fn idle(control: &Control, folder: &Folder, account: &str) -> Result<Channel, Status> {
    let csr = KeyAndCsr::generate(None).unwrap().csr_pem;
    let request = IstioCertificateRequest { csr, ..IstioCertificateRequest::default() };
    let channel = connect(control, folder).await;
    create_certificate(channel.clone(), bearer(&folder.token(account)), request).await?;
    Ok(channel)
}

#[tokio::test]
async fn connections_without_calls_are_closed_when_the_limit_is_reached() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    let control = folder.start_with("0", &["--max-connections", "6"]).await;
    let (tls, _) = certificate(&control, &folder, "client").await;
    let mut used = proxy(endpoint(&control.tls, tls), "client", "");
    used.until(&["reviews"], &[]).await;
    let mut others = Vec::new();
    for _ in 0..20 {
        others.push(idle(&control, &folder, "idle").await.unwrap());
    }
    // Silent clients do not cause the used connection to close.
    for _ in 0..20 {
        TcpStream::connect(&control.tls).await.unwrap();
    }
    let (tls, _) = certificate(&control, &folder, "other").await;
    let mut new = proxy(endpoint(&control.tls, tls), "other", "");
    new.until(&["reviews"], &[]).await;
    folder.service("ratings", 2);
    used.until(&["reviews", "ratings"], &[]).await;
    let metrics = control.page("/metrics").await;
    assert!(metrics.contains("skysail_xds_connections 2\n"), "neither proxy had to reconnect: {metrics}");
    assert!(metrics.contains("skysail_connections_refused 0\n"), "{metrics}");
    used.task.abort();
    new.task.abort();
}

#[tokio::test]
async fn the_number_of_connections_with_calls_per_identity_is_limited() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    let control = folder.start_with("0", &["--max-connections-per-identity", "1"]).await;
    let (tls, _) = certificate(&control, &folder, "client").await;
    let mut first = proxy(endpoint(&control.tls, tls), "client", "");
    first.until(&["reviews"], &[]).await;
    let refused = idle(&control, &folder, "client").await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    let words = "sa/client has 1 connections with calls in progress";
    assert!(refused.message().contains(words), "{refused}");
    let (one, two) = tokio::join!(idle(&control, &folder, "other"), idle(&control, &folder, "another"));
    let _open = (one.unwrap(), two.unwrap(), idle(&control, &folder, "other").await.unwrap());
    first.task.abort();
    while let Err(refused) = idle(&control, &folder, "client").await {
        assert!(refused.message().contains(words), "{refused}");
    }
}

#[tokio::test]
async fn control_characters_in_a_node_id_are_escaped_in_the_log() {
    let folder = Folder::new();
    let mut control = folder.start("0").await;
    let (tls, _) = certificate(&control, &folder, "client").await;
    let id = "sidecar~10.0.0.1~x\n{\"level\":\"INFO\"}\u{1b}[2J\u{202e}.default~default.svc.cluster.local";
    let node = Node { id: id.into(), ..node("other", "Kubernetes") };
    let proxy = proxy_of(endpoint(&control.tls, tls), node, "");
    let line = control.logged("discovery refused").await;
    let proxy_id = line["proxy"].as_str().unwrap();
    assert!(
        proxy_id.contains("202e") && proxy_id.chars().all(|c| !c.is_control() && c != '\u{202e}'),
        "{proxy_id}"
    );
    assert_eq!(line["more"], 0, "such lines are throttled: {line}");
    proxy.task.abort();
}

#[tokio::test]
async fn streams_end_with_their_pod() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    let write = |uid: &str| {
        let text = format!(
            "apiVersion: v1\nkind: Pod\nmetadata: {{name: client-1, namespace: default, uid: '{uid}'}}\nspec: {{serviceAccountName: client, containers: [{{name: a, image: b}}]}}\n"
        );
        fs::write(folder.at("config/client.yaml"), text).unwrap();
    };
    write("1");
    let mut control = folder.start("0").await;
    let token = |uid: &str| folder.token_of_pod("client", "client-1", uid);
    let (tls, _) = certificate_by(&control, &folder, &token("1")).await;
    let mut old = proxy(endpoint(&control.tls, tls), "client", "");
    old.until(&["reviews"], &[]).await;
    // Another pod with the same name replaces the pod.
    write("2");
    old.connected.wait_for(|connected| !connected).await.unwrap();
    let line = control.logged("caller refused").await;
    assert!(
        line["reason"].as_str().unwrap().contains("pod default/client-1, which no longer exists"),
        "{line}"
    );
    let (tls, _) = certificate_by(&control, &folder, &token("2")).await;
    let mut new = proxy(endpoint(&control.tls, tls), "client", "");
    new.until(&["reviews"], &[]).await;
    fs::remove_file(folder.at("config/client.yaml")).unwrap();
    new.connected.wait_for(|connected| !connected).await.unwrap();
    old.task.abort();
    new.task.abort();

    // A credential of one pod does not authorize for the configuration of another.
    let (tls, _) = certificate_by(&control, &folder, &folder.token_of_pod("client", "client-2", "")).await;
    let other = proxy(endpoint(&control.tls, tls), "client", "");
    let line = control.logged("discovery refused").await;
    assert!(line["reason"].as_str().unwrap().contains("a credential of pod client-2"), "{line}");
    other.task.abort();
}

#[tokio::test]
async fn a_restart_deletes_nothing() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    let control = folder.start("0").await;
    let (tls, _) = certificate(&control, &folder, "client").await;
    let mut proxy = proxy(endpoint(&control.tls, tls), "client", "");
    proxy.until(&["reviews"], &[]).await;
    let before = proxy.clusters.borrow().len();

    let address = control.terminate().await;
    proxy.connected.wait_for(|connected| !connected).await.unwrap();
    assert_eq!(proxy.clusters.borrow().len(), before);
    folder.service("ratings", 2);
    let port = address.rsplit(':').next().unwrap();
    let control = folder.start(port).await;
    proxy.until(&["reviews", "ratings"], &[]).await;
    assert!(proxy.clusters.borrow().len() > before);
    proxy.task.abort();
    control.terminate().await;
}

#[tokio::test]
async fn a_control_plane_killed_during_changes_loses_nothing() {
    const ROUNDS: u8 = 6;
    const STAY: [&str; 3] = ["reviews", "ratings", "details"];
    let folder = Folder::new();
    for (service, ip) in STAY.into_iter().zip(1..) {
        folder.service(service, ip);
    }
    let mut control = folder.start("0").await;
    let (tls, _) = certificate(&control, &folder, "client").await;
    let mut old = proxy(endpoint(&control.tls, tls.clone()), "client", "");
    old.until(&STAY, &[]).await;
    for round in 0..ROUNDS {
        for change in 0..10 {
            let (comes, goes) = (format!("moves-{change}"), format!("moves-{}", (change + 5) % 10));
            folder.service(&comes, 10 * (round + 1) + change);
            let _ = fs::remove_file(folder.at("config").join(format!("{goes}.yaml")));
            if change == round {
                // At once, or while it sends a change.
                if round % 2 == 1 {
                    old.clusters.changed().await.unwrap();
                }
                control.child.start_kill().unwrap();
            }
        }
        control.child.wait().await.unwrap();
        let port = control.tls.rsplit(':').next().unwrap().to_owned();
        control = folder.start(&port).await;
        let last = format!("round-{round}");
        folder.service(&last, 100 + round);
        old.until(&[&last], &[]).await;
    }
    let removals = old.removals.lock().unwrap().clone();
    assert!(STAY.iter().all(|service| removals.iter().all(|name| !name.contains(service))), "{removals:?}");

    let mut new = proxy(endpoint(&control.tls, tls), "client", "");
    for proxy in [&mut old, &mut new] {
        let removed = ["moves-0", "moves-1", "moves-2", "moves-3", "moves-4"];
        proxy.until(&["moves-5", "moves-9", "round-0", "round-5"], &removed).await;
    }
    let bodies = |proxy: &Proxy| -> BTreeMap<String, bytes::Bytes> {
        proxy.clusters.borrow().values().map(|one| (one.name.clone(), one.body.clone())).collect()
    };
    assert!(bodies(&old) == bodies(&new), "they have the same names, but not the same clusters");
    old.task.abort();
    new.task.abort();
    control.terminate().await;
}
