//! Prefetch of virtual hosts from a control plane process, with and without persistent state.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "helpers of tests may end the test")]

mod support;

use std::{collections::BTreeSet, fs};

use skysail_core::names;
use skysail_xds::{
    Kind,
    client::{Client, Connection, Form, Options, Subscriptions},
    envoy::pb::{envoy::config::core::v3::Node, google::protobuf::value},
    istio::{string, structure},
};
use support::{Control, Folder, certificate, endpoint};
use tokio::{sync::mpsc, task::JoinHandle};

const HOST: &str = "80/reviews.default.svc.cluster.local:80";

/// A proxy that subscribes to virtual hosts, and records added and missing ones.
struct Proxy {
    subscriptions: Subscriptions,
    updates: mpsc::UnboundedReceiver<(BTreeSet<String>, BTreeSet<String>)>,
    task: JoinHandle<()>,
}

impl Proxy {
    async fn start(control: &Control, folder: &Folder, account: &str) -> Self {
        let fields = [
            ("SERVICE_ACCOUNT", string(account)),
            ("NAMESPACE", string("default")),
            (names::TAKES_VIRTUAL_HOSTS, string("true")),
        ];
        let Some(value::Kind::StructValue(metadata)) = structure(fields).kind else {
            unreachable!("a structure")
        };
        let id = "sidecar~10.0.0.1~client-1.default~default.svc.cluster.local".into();
        let node = Node { id, metadata: Some(metadata), ..Node::default() };
        let (client, subscriptions) = Client::new(Options { node, form: Form::Delta, wildcard: vec![] });
        let (tls, _) = certificate(control, folder, account).await;
        let endpoint = endpoint(&control.tls, tls);
        let (sender, updates) = mpsc::unbounded_channel();
        let keep = subscriptions.clone();
        let task = tokio::spawn(async move {
            let connect = async move || Ok(Connection::new(endpoint.connect().await?));
            let handler = async move |update: skysail_xds::client::Update| {
                let added: BTreeSet<_> = update.added.into_iter().map(|received| received.name).collect();
                keep.subscribe(Kind::VirtualHost, added.iter().map(String::as_str));
                let _ = sender.send((added, update.removed.into_iter().collect()));
                Vec::new()
            };
            client.run(connect, handler).await;
        });
        Self { subscriptions, updates, task }
    }

    /// Subscribes to these names. Returns the first update: hosts, and names that do not exist.
    async fn subscribe(&mut self, names: &[&str]) -> (Vec<String>, Vec<String>) {
        self.subscriptions.set(Kind::VirtualHost, names.iter().map(|name| (*name).to_owned()).collect());
        let (added, removed) = self.updates.recv().await.unwrap();
        assert!(self.subscriptions.is_ours());
        (added.into_iter().collect(), removed.into_iter().collect())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[tokio::test]
async fn hosts_that_a_proxy_used_are_prefetched_for_the_next_proxy_of_its_identity() {
    let folder = Folder::new();
    folder.service("reviews", 1);
    folder.service("ratings", 2);
    let state = folder.at("state");
    let arguments = ["--state-dir", state.to_str().unwrap()];
    let control = folder.start_with("0", &arguments).await;
    let mut first = Proxy::start(&control, &folder, "client").await;
    let (hosts, absent) = first.subscribe(&["80/*", "80/reviews", "80/none"]).await;
    assert_eq!((hosts.as_slice(), absent.len()), (&[HOST.to_owned()][..], 3));
    drop(first);

    let (host, catch_all) = (vec![HOST.to_owned()], vec!["80/*".to_owned()]);
    let mut next = Proxy::start(&control, &folder, "client").await;
    assert_eq!(next.subscribe(&["80/*"]).await, (host.clone(), catch_all.clone()));
    let mut other = Proxy::start(&control, &folder, "other").await;
    assert_eq!(other.subscribe(&["80/*"]).await, (vec![], catch_all.clone()));
    assert!(control.page("/debug/used").await.contains(HOST));

    // A restart keeps the history.
    control.terminate().await;
    let control = folder.start_with("0", &arguments).await;
    let mut next = Proxy::start(&control, &folder, "client").await;
    assert_eq!(next.subscribe(&["80/*"]).await, (host, catch_all.clone()));
    // A host that the proxy unsubscribes from is not prefetched.
    let (_, absent) = next.subscribe(&["80/*", "80/none"]).await;
    assert_eq!(absent, ["80/none"]);
    drop(next);
    control.terminate().await;

    // An invalid state file loses only the history.
    let file = fs::read_dir(&state).unwrap().next().unwrap().unwrap().path();
    fs::write(file, "[").unwrap();
    let control = folder.start_with("0", &arguments).await;
    let mut next = Proxy::start(&control, &folder, "client").await;
    assert_eq!(next.subscribe(&["80/*"]).await, (vec![], catch_all));
    drop(next);
    control.terminate().await;
}
