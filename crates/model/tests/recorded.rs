//! Configuration that a real istiod accepted is accepted without an error.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{fs, path::Path};

use skysail_model::{Diagnostic, Severity, World, parse};

/// Reads folders of `tests/istiod` into one World. Returns it with the diagnostics.
fn load(folders: &[&str]) -> (World, Vec<Diagnostic>) {
    let (mut world, mut findings) = (World::new(), Vec::new());
    for folder in folders {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/istiod").join(folder);
        let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.retain(|file| file.extension().is_some_and(|end| end == "yaml"));
        files.sort();
        for file in files {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            let parsed = parse(&fs::read_to_string(&file).unwrap(), &name);
            findings.extend(parsed.diagnostics);
            for (object, origin) in parsed.objects {
                world.apply(object, origin);
            }
        }
    }
    (world, findings)
}

fn errors(findings: &[Diagnostic]) -> Vec<String> {
    findings.iter().filter(|finding| finding.severity == Severity::Error).map(ToString::to_string).collect()
}

#[test]
fn all_scenarios_are_accepted_without_an_error() {
    for scenario in [
        "b-mtls-all-v1",
        "c-reviews-test-v2",
        "d-fault-abort",
        "d-fault-delay",
        "e-reviews-50-v3",
        "f-strict-authz",
        "f2-authz-deny-custom-ports",
        "g-serviceentry",
        "n-destinationrule-policies",
        "o-virtualservice-features",
    ] {
        let (world, findings) = load(&["00-base", scenario]);
        assert_eq!(errors(&findings), [""; 0], "{scenario}");
        for finding in
            findings.iter().chain(&world.validate()).filter(|finding| finding.severity == Severity::Warning)
        {
            println!("{scenario}: {finding}");
        }
        assert_eq!(errors(&world.validate()), [""; 0], "{scenario}");
    }
}

#[test]
fn the_world_indexes_bookinfo() {
    let (world, _) = load(&["00-base", "b-mtls-all-v1"]);
    let reviews = world.service("reviews.default.svc.cluster.local").unwrap();
    let endpoints = world.endpoints(reviews, &reviews.spec.ports[0]);
    let ports: Vec<_> = endpoints.iter().map(|endpoint| (endpoint.port, endpoint.ready)).collect();
    assert_eq!(ports, [(9080, true); 3]);
    let zones: Vec<_> = endpoints.iter().map(|endpoint| endpoint.locality.zone.as_str()).collect();
    assert!(zones.iter().all(|zone| zone.starts_with("us-")), "{zones:?}");
    assert!(endpoints.iter().all(skysail_model::Endpoint::has_sidecar));
    let workload = &endpoints[0].pod.as_ref().unwrap().spec.workload;
    assert!(workload.name.starts_with("reviews-v"), "{workload:?}");

    let identities: Vec<_> = world.service_identities(reviews).iter().map(ToString::to_string).collect();
    assert_eq!(identities, ["spiffe://cluster.local/ns/default/sa/bookinfo-reviews"]);
    let rule = world.destination_rule("reviews.default.svc.cluster.local", "default").unwrap();
    assert_eq!(
        rule.spec.subsets.iter().map(|subset| subset.name.as_str()).collect::<Vec<_>>(),
        ["v1", "v2", "v3"]
    );
    assert!(world.virtual_service("reviews.default.svc.cluster.local", "default", |_| true).is_some());
    assert_eq!(world.mesh().trust_domain, "cluster.local");
}
