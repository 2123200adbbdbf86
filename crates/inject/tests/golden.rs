//! Golden files: `NAME.yaml` is injected and compared with `NAME.injected.yaml`. `UPDATE=1` writes the latter.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::{env, fs, path::Path};

use skysail_inject::{Interceptor, Settings, inject_text, namespaces_in};

/// Injects a file with settings that its name selects.
fn check(name: &str, settings: &Settings) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let input = fs::read_to_string(folder.join(format!("{name}.yaml"))).unwrap();
    let result = inject_text(&input, "", &namespaces_in(&input).unwrap(), settings).unwrap();
    let comments: String = result.messages.iter().map(|line| format!("# {line}\n")).collect();
    let text = format!("{comments}{}", result.text);
    let file = folder.join(format!("{name}.injected.yaml"));
    if env::var_os("UPDATE").is_some() {
        fs::write(&file, &text).unwrap();
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), text, "{name}; UPDATE=1 writes the new result");
}

fn settings() -> Settings {
    Settings::new("registry.example/skysail-proxy:1")
}

#[test]
fn a_deployment_gets_a_native_sidecar() {
    check("demo", &settings());
}

#[test]
fn annotations_change_the_sidecar() {
    check("annotations", &settings());
}

#[test]
fn an_ordinary_sidecar_is_held_or_comes_last() {
    check("ordinary", &settings());
}

#[test]
fn a_gateway_is_a_router_without_interception() {
    check("gateway", &settings());
}

#[test]
fn a_container_of_the_user_overrides_fields() {
    check("overrides", &settings());
}

#[test]
fn with_a_cni_plugin_the_pod_has_no_capabilities() {
    let mut settings = settings();
    settings.interceptor = Interceptor::Cni;
    settings.apply_mesh_config("trustDomain: mesh.example\ndefaultConfig: {proxyMetadata: {A: b}}").unwrap();
    check("cni", &settings);
}
