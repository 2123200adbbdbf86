//! All recorded responses of istiod, to sidecars and gateways, in both variants of the discovery protocol, and
//! the updates after changes of the configuration. The sidecar rejects nothing and has all resources.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use skysail_xds::Kind;

use crate::{
    agent::{Program, recording},
    player::Player,
    support::within,
};

#[tokio::test]
async fn every_view_is_accepted_as_state_of_the_world() {
    every_view("GRPC").await;
}

#[tokio::test]
async fn every_view_is_accepted_as_delta() {
    every_view("DELTA_GRPC").await;
}

#[tokio::test]
async fn updates_are_accepted_as_state_of_the_world() {
    taken(&recording("u-updates/xds/productpage-v1/sotw"), "GRPC").await;
}

#[tokio::test]
async fn updates_are_accepted_as_delta() {
    taken(&recording("u-updates/xds/productpage-v1/delta"), "DELTA_GRPC").await;
}

/// Recordings that no proxy of this machine accepts, with the reasons.
const REFUSED: [(&str, &str); 4] = [
    (
        "s-envoyfilter/xds/productpage-v1",
        "an EnvoyFilter adds a filter after the router, which Envoy refuses too",
    ),
    (
        "x-dr-kinds/xds/istio-ingressgateway",
        "a DestinationRule names the file /etc/c/crl.pem, which does not exist",
    ),
    ("x-dr-kinds/xds/productpage-v1", "the same file"),
    ("x-dr-kinds/xds/reviews-v1", "the same file"),
];

async fn every_view(api_type: &str) {
    let folders = |folder: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(folder).into_iter().flatten();
        entries.map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect()
    };
    let scenarios = folders(&recording("."));
    let views = scenarios.iter().filter(|scenario| !scenario.ends_with("u-updates"));
    let views: Vec<PathBuf> = views.flat_map(|scenario| folders(&scenario.join("xds"))).collect();
    assert_eq!(views.len(), 89);
    let accepted = views.iter().filter(|view| !REFUSED.iter().any(|(refused, _)| view.ends_with(refused)));
    for view in accepted {
        taken(view, api_type).await;
    }
}

/// Checks that a sidecar accepts the recording in a directory and finally has its resources.
async fn taken(folder: &Path, api_type: &str) {
    let (player, control) = Player::start(folder).await;
    let program = Program::start(folder, api_type, control, control).await;
    player.ready.notify_one();
    within(player.finished.notified()).await;
    let dump = program.page("/config_dump").await;
    let body = dump.split_once("\r\n\r\n").unwrap().1;
    let dump: Value = serde_json::from_str(body).expect(body);
    let state = player.state.lock().unwrap();
    assert_eq!(state.refused, [""; 0], "{folder:?}");
    for (kind, list, inner) in [
        (Kind::Cluster, "dynamic_active_clusters", "cluster"),
        (Kind::Listener, "dynamic_listeners", "active_state"),
        (Kind::Route, "dynamic_route_configs", "route_config"),
    ] {
        let there: BTreeSet<String> = names(&dump, list, inner).collect();
        // A route table that no listener names any more is sent once more, empty.
        let sent = state.there.get(&kind).into_iter().flatten();
        let sent: BTreeSet<String> =
            sent.filter(|name| kind != Kind::Route || there.contains(*name)).cloned().collect();
        assert_eq!(there, sent, "{kind:?} of {folder:?}");
    }
}

fn names<'a>(dump: &'a Value, list: &'a str, inner: &'a str) -> impl Iterator<Item = String> + 'a {
    let lists = dump["configs"].as_array().unwrap().iter().filter_map(move |config| config[list].as_array());
    lists.flatten().map(move |item| {
        let name = item["name"].as_str().or_else(|| item[inner]["name"].as_str());
        name.unwrap().to_owned()
    })
}
