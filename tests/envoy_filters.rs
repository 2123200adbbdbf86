//! EnvoyFilters as people write them: what the sidecar makes of each, and the effect of two of them on requests.
//!
//! `tests/envoy_filters` has one file for each use. A comment `# refused: TEXT` names a field that the sidecar refuses;
//! all other files must be taken.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{collections::BTreeMap, fs, path::Path};

use skysail_model::{ProxyNode, Severity, World, api::kube::Locality, compile, parse};
use skysail_proxy::explain;
use skysail_testkit::{Setup, eventually};
use skysail_xds::Kind;

const SHOP: &str = include_str!("shop.yaml");

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/envoy_filters")
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
    let mut count = 0;
    for entry in fs::read_dir(folder()).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        count += 1;
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
    assert!(count >= 30, "{count} files");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns a file of the folder.
fn file(name: &str) -> String {
    fs::read_to_string(folder().join(name)).unwrap()
}

#[test]
fn scripts_and_rate_limits_act_on_requests() {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), SHOP).ready();
    let url = "http://stock.shop/";
    let call = || mesh.call("front", url, &[]);
    mesh.wait_status("front", url, &[], 200);
    assert!(!format!("{:?}", call()).contains("x-lua"));
    mesh.put("lua.yaml", &file("lua.yaml"));
    eventually("the script adds its header", || match format!("{:?}", call()) {
        answer if answer.contains("x-lua") => Ok(()),
        answer => Err(answer),
    });
    mesh.put("limit.yaml", &file("local-rate-limit.yaml"));
    eventually("the limit refuses requests", || match call() {
        answer if answer.status == Some(429) => Ok(()),
        answer => Err(format!("{answer:?}")),
    });
}
