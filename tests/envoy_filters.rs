//! EnvoyFilters as people write them: what the sidecar makes of each, and the effect of some on requests, at the sidecar and
//! at a real Envoy.
//!
//! `tests/envoy_filters` has one file for each use. A comment `# refused: TEXT` names a field that the sidecar refuses;
//! all other files must be taken.

#![allow(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{collections::BTreeMap, fs, path::Path};

use skysail_model::{ProxyNode, Severity, World, api::kube::Locality, compile, parse};
use skysail_proxy::explain;
use skysail_testkit::{Setup, envoy, eventually};
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

/// A patch whose effect a request shows.
struct Effect {
    /// File with the patch.
    file: &'static str,
    /// Text of the file that is replaced, so that one request shows the effect.
    change: (&'static str, &'static str),
    path: &'static str,
    arguments: &'static [&'static str],
    status: u16,
    /// Text that the head or the body of the response has, and lacks without the patch.
    has: &'static str,
}

/// An effect of a file as it is on a request without arguments.
const fn effect(file: &'static str, path: &'static str, status: u16, has: &'static str) -> Effect {
    Effect { file, change: ("", ""), path, arguments: &[], status, has }
}

const EFFECTS: &[Effect] = &[
    effect("lua.yaml", "/", 200, "x-lua: added"),
    effect("header-mutation.yaml", "/", 200, "\"x-mesh\":\"shop\""),
    effect("response-headers.yaml", "/", 200, "\"x-port\":\"80\""),
    effect("xff.yaml", "/", 200, "\"x-forwarded-for\":"),
    effect("request-id.yaml", "/", 200, "\nx-request-id: "),
    effect("merge-slashes.yaml", "/a//b", 200, "\"path\":\"/a/b\""),
    effect("escaped-slashes.yaml", "/a%2Fb", 400, ""),
    effect("jwt.yaml", "/", 401, "Jwt is missing"),
    effect("local-rate-limit.yaml", "/", 429, "x-local-rate-limit: true"),
    Effect {
        arguments: &["-H", "accept-encoding: gzip"],
        ..effect("compressor.yaml", "/", 200, "content-encoding: gzip")
    },
    Effect {
        arguments: &[
            "-X",
            "OPTIONS",
            "-H",
            "origin: https://shop.example.com",
            "-H",
            "access-control-request-method: GET",
        ],
        ..effect("cors.yaml", "/", 200, "access-control-allow-methods: GET,POST")
    },
    Effect {
        change: ("numerator: 10,", "numerator: 100,"),
        ..effect("fault.yaml", "/", 503, "fault filter abort")
    },
    Effect {
        change: ("timeout: 11s", "timeout: 0.2s"),
        ..effect("route-timeout.yaml", "/delay/20s", 504, "upstream request timeout")
    },
    Effect {
        change: ("max_requests: 100", "max_requests: 0"),
        ..effect("circuit-breaker.yaml", "/", 503, "x-envoy-overloaded: true")
    },
    Effect {
        change: ("max_request_bytes: 65536", "max_request_bytes: 4"),
        arguments: &["-d", "12345"],
        ..effect("body-limit.yaml", "/", 413, "")
    },
];

/// Checks that each patch acts on a request, in a mesh whose sidecars are all `skysail-proxy` or all Envoy.
fn patches_act_on_requests(arguments: &[&str]) {
    let mesh = Setup::of_text(env!("CARGO_BIN_EXE_skysail"), SHOP).with(arguments).ready();
    mesh.wait_status("front", "http://stock.shop/", &[], 200);
    for effect in EFFECTS {
        let url = format!("http://stock.shop{}", effect.path);
        let ask = || {
            let answer = mesh.call("front", &url, &[&["-i", "--max-time", "5"], effect.arguments].concat());
            let acts = answer.status == Some(effect.status) && answer.body.contains(effect.has);
            (acts, format!("{answer:?}"))
        };
        // The patch before goes with this one.
        let text = file(effect.file);
        assert!(text.contains(effect.change.0), "{}", effect.file);
        mesh.put("patch.yaml", &text.replacen(effect.change.0, effect.change.1, 1));
        eventually(effect.file, || match ask() {
            (true, _) => Ok(()),
            (false, answer) => Err(answer),
        });
        mesh.put("patch.yaml", "");
        eventually(&format!("without {}", effect.file), || match ask() {
            (false, _) => Ok(()),
            (true, answer) => Err(answer),
        });
    }
}

#[test]
fn patches_act_on_requests_at_the_sidecar() {
    patches_act_on_requests(&[]);
}

#[test]
fn patches_act_on_requests_at_an_envoy() {
    let envoy = envoy();
    let of = |workload: &str| format!("shop/{workload}={}", envoy.display());
    patches_act_on_requests(&["--envoy", &of("front"), "--envoy", &of("stock-v1")]);
}
