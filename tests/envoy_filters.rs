//! EnvoyFilters as people write them: what the sidecar makes of each, and the effect of each in a mesh, at
//! the sidecar and at a real Envoy.
//!
//! `tests/envoy_filters` has one file for each use. A comment `# refused: TEXT` names a field that the
//! sidecar refuses; all other files must be taken. An effect is there with the patch, and absent after its
//! removal. `requests` has the effects that one request of a workload shows, `observations` all others.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

#[path = "envoy_filters/observations.rs"]
mod observations;
#[path = "envoy_filters/requests.rs"]
mod requests;
#[path = "envoy_filters/scene.rs"]
mod scene;
#[path = "envoy_filters/services.rs"]
mod services;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use skysail_model::{ProxyNode, Severity, World, api::kube::Locality, compile, parse};
use skysail_proxy::explain;
use skysail_xds::Kind;

use crate::scene::{Scene, Side};

const SHOP: &str = include_str!("shop.yaml");

/// Returns the files with EnvoyFilters.
fn files() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/envoy_filters");
    let all = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    all.filter(|path| path.extension().is_some_and(|end| end == "yaml")).collect()
}

fn name(path: &Path) -> String {
    path.file_name().unwrap().to_string_lossy().into_owned()
}

fn world_of(texts: &[&str]) -> World {
    let mut world = World::new();
    for text in texts {
        let parsed = parse(text, "test.yaml");
        let errors = parsed.diagnostics.iter().filter(|found| found.severity == Severity::Error);
        assert_eq!(errors.map(ToString::to_string).collect::<Vec<_>>(), [""; 0]);
        for (object, origin) in parsed.objects {
            world.apply(object, origin);
        }
    }
    world
}

/// Resources of the sidecars of both workloads, by workload, type and name.
type Compiled = BTreeMap<(&'static str, Kind, String), bytes::Bytes>;

fn compiled(world: &World) -> Compiled {
    let mut all = Compiled::new();
    for app in ["front", "stock"] {
        let id = format!("sidecar~10.0.1.1~{app}-1.shop~shop.svc.cluster.local");
        let metadata = serde_json::json!({"LABELS": {"app": app}});
        let mut node = ProxyNode::parse(&id, metadata, Locality::default()).unwrap();
        world.identify(&mut node, "Kubernetes").unwrap();
        let (made, _) = compile(world, &node.view);
        for kind in Kind::ALL {
            let resources = made.iter(kind);
            all.extend(resources.map(|one| ((app, kind, one.name.to_string()), one.body.clone())));
        }
    }
    all
}

/// Returns what the sidecar refuses of one workload's resources.
fn refused(all: &Compiled, of: &str) -> Vec<String> {
    let own = all.iter().filter(|((app, ..), _)| *app == of);
    let resources: Vec<explain::EncodedResource> = own
        .map(|((_, kind, name), body)| explain::EncodedResource {
            kind: *kind,
            name: name.clone(),
            body: body.clone(),
        })
        .collect();
    let loaded = explain::ProxyConfiguration::load(&resources);
    loaded.refused().iter().map(|(name, reason)| format!("{name}: {reason}")).collect()
}

#[test]
fn common_patches_are_taken_or_refused_by_field() {
    let before = compiled(&world_of(&[SHOP]));
    assert_eq!(refused(&before, "front"), [""; 0]);
    let mut wrong = Vec::new();
    let files = files();
    for path in &files {
        let text = fs::read_to_string(path).unwrap();
        let name = name(path);
        let after = compiled(&world_of(&[SHOP, &text]));
        if after == before {
            wrong.push(format!("{name}: changes nothing"));
        }
        let mut found = refused(&after, "front");
        found.extend(refused(&after, "stock"));
        let expected = text.lines().find_map(|line| line.strip_prefix("# refused: "));
        match expected {
            None => wrong.extend(found.first().map(|found| format!("{name}: {found}"))),
            Some(expected) => {
                if !found.iter().any(|found| found.contains(expected)) {
                    wrong.push(format!("{name}: expected {expected:?}, found {found:?}"));
                }
            }
        }
    }
    assert!(files.len() >= 30, "{} files", files.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn each_file_has_a_test_of_its_effect() {
    let all: BTreeSet<String> = files().iter().map(|path| name(path)).collect();
    let tested: BTreeSet<String> =
        requests::files().chain(observations::files()).map(str::to_owned).collect();
    assert_eq!(all, tested);
}

#[test]
fn patches_act_on_requests_at_the_sidecar() {
    requests::check(&Scene::of(Side::Sidecar));
}

#[test]
fn patches_act_on_requests_at_an_envoy() {
    requests::check(&Scene::of(Side::Envoy));
}

#[test]
fn patches_act_on_connections_and_telemetry_at_the_sidecar() {
    observations::check(&Scene::of(Side::Sidecar));
}

#[test]
fn patches_act_on_connections_and_telemetry_at_an_envoy() {
    observations::check(&Scene::of(Side::Envoy));
}
