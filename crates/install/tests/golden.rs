//! The objects of installations, as `skysail install --output yaml` prints them. `SKYSAIL_WRITE_GOLDEN=1` writes them
//! again.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{env, fs, path::Path};

use skysail_install::{Installation, Target, Validation, objects};

fn check(name: &str, installation: &Installation) {
    let objects = objects(installation);
    let text: String =
        objects.iter().map(|object| format!("---\n{}", skysail_inject::yaml(object.value()))).collect();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.yaml"));
    if env::var_os("SKYSAIL_WRITE_GOLDEN").is_some() {
        fs::write(&file, &text).unwrap();
    }
    assert_eq!(
        fs::read_to_string(&file).unwrap(),
        text,
        "{name}; SKYSAIL_WRITE_GOLDEN=1 writes the new result"
    );
}

fn default() -> Installation {
    Installation {
        target: Target::new("istio-system", "default").unwrap(),
        control_image: "registry.example/skysaild:1".into(),
        proxy_image: "registry.example/skysail-proxy:1".into(),
        cni: false,
        validation: Validation::Ignore,
        deploys_gateways: true,
        replicas: None,
        arguments: Vec::new(),
        plain_port: None,
    }
}

#[test]
fn the_default_revision() {
    check("default", &default());
}

#[test]
fn another_revision_with_all_settings() {
    let installation = Installation {
        target: Target::new("mesh", "canary").unwrap(),
        cni: true,
        validation: Validation::Fail,
        deploys_gateways: false,
        replicas: Some(3),
        arguments: vec!["--plain-port=15010".into()],
        plain_port: Some(15_010),
        ..default()
    };
    check("canary", &installation);
}
