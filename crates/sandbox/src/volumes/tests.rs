use serde_json::json;

use super::*;
use crate::objects::{Data, PodSpec, Template, Workload};

/// Returns a pod with these volumes and mounts.
fn pod(volumes: Value, mounts: Value) -> Pod {
    let spec: PodSpec = serde_json::from_value(json!({
        "volumes": volumes, "containers": [{ "name": "c", "image": "i", "volumeMounts": mounts }],
    }))
    .unwrap();
    let workload = Workload {
        kind: "Pod".to_owned(),
        namespace: "n".to_owned(),
        template: Template { spec, ..Template::default() },
        ..Workload::default()
    };
    let mut pod = Pod::new(&workload, "p".to_owned(), [10, 244, 0, 2].into(), &BTreeMap::new());
    pod.labels =
        [("app", "a"), ("say", "\"b\"")].map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    pod
}

fn objects() -> Objects {
    let data = |pairs: &[(&str, &[u8])]| -> Data {
        pairs.iter().map(|(key, bytes)| ((*key).to_owned(), bytes.to_vec())).collect()
    };
    let key = |kind: &str, name: &str| (kind.to_owned(), "n".to_owned(), name.to_owned());
    let map = Values { data: data(&[("a", b"1"), ("b", b"2")]), binary: data(&[("c", &[0xff, 0])]) };
    let secret = Values { data: data(&[("k", &[0xfe])]), ..Values::default() };
    let values = [(key("ConfigMap", "m"), map), (key("Secret", "s"), secret)].into();
    Objects { values, ..Objects::default() }
}

/// Returns the files of a volume with this source, as `path mode content`.
fn filled(source: Value) -> Result<Vec<String>, String> {
    let mut volume = json!({ "name": "v" });
    volume.as_object_mut().unwrap().extend(source.as_object().unwrap().clone());
    let contents = contents(&pod(json!([volume]), json!([])), &BTreeSet::from(["v".to_owned()]), &objects());
    let files = contents.into_values().next().unwrap()?;
    let shown = files.into_iter().map(|(path, (mode, content))| match content {
        FileContent::Bytes(bytes) => format!("{} {mode:o} {}", path.display(), bytes.escape_ascii()),
        FileContent::Token(audience) => format!("{} {mode:o} token for {audience}", path.display()),
    });
    Ok(shown.collect())
}

#[test]
fn keys_become_files_with_their_modes() {
    assert_eq!(
        filled(json!({ "configMap": { "name": "m" } })).unwrap(),
        ["a 644 1", "b 644 2", "c 644 \\xff\\x00"]
    );
    let items = json!([{ "key": "a", "path": "d/x", "mode": 0o400 }, { "key": "c", "path": "y" }]);
    let source = json!({ "configMap": { "name": "m", "items": items, "defaultMode": 0o600 } });
    assert_eq!(filled(source).unwrap(), ["d/x 400 1", "y 600 \\xff\\x00"]);
    assert_eq!(
        filled(json!({ "secret": { "secretName": "s", "defaultMode": 0o400 } })).unwrap(),
        ["k 400 \\xfe"]
    );
}

#[test]
fn a_missing_object_is_reported_unless_it_is_optional() {
    let missing = |source| filled(source).unwrap_err();
    assert_eq!(missing(json!({ "configMap": { "name": "x" } })), "ConfigMap n/x does not exist");
    assert_eq!(missing(json!({ "secret": { "secretName": "x" } })), "Secret n/x does not exist");
    let items = json!([{ "key": "x", "path": "x" }]);
    assert_eq!(
        missing(json!({ "configMap": { "name": "m", "items": items } })),
        "ConfigMap n/m has no key x"
    );
    for source in [
        json!({ "configMap": { "name": "x", "optional": true } }),
        json!({ "secret": { "secretName": "x", "optional": true } }),
        json!({ "configMap": { "name": "m", "items": items, "optional": true } }),
    ] {
        assert_eq!(filled(source).unwrap(), Vec::<String>::new());
    }
}

#[test]
fn sources_are_projected_into_one_folder() {
    let fields = json!([
        { "path": "labels", "fieldRef": { "fieldPath": "metadata.labels" } },
        { "path": "name", "fieldRef": { "fieldPath": "metadata.name" }, "mode": 0o444 },
        { "path": "cpu", "resourceFieldRef": { "resource": "limits.cpu" } },
    ]);
    let source = json!({ "projected": { "defaultMode": 0o440, "sources": [
        { "configMap": { "name": "m", "items": [{ "key": "a", "path": "a" }] } },
        { "secret": { "name": "s" } },
        { "downwardAPI": { "items": fields } },
        { "serviceAccountToken": { "path": "token", "audience": "vault" } },
        { "serviceAccountToken": { "path": "api" } },
    ] } });
    let expected = [
        "a 440 1",
        "api 440 token for https://kubernetes.default.svc.cluster.local",
        "k 440 \\xfe",
        "labels 440 app=\\\"a\\\"\\nsay=\\\"\\\\\\\"b\\\\\\\"\\\"",
        "name 444 p",
        "token 440 token for vault",
    ];
    assert_eq!(filled(source).unwrap(), expected);
}

#[test]
fn paths_out_of_the_volume_make_no_files() {
    for path in ["../x", "a/../../x", "/etc/x", "..data", "", "a/./../../x"] {
        assert_eq!(path_of(path), None, "{path}");
        let items = json!([{ "key": "a", "path": path }]);
        assert_eq!(
            filled(json!({ "configMap": { "name": "m", "items": items } })).unwrap(),
            Vec::<String>::new()
        );
    }
    assert_eq!(path_of("a/b"), Some("a/b".into()));
}

#[test]
fn kinds_limits_and_mounts_of_volumes_are_read() {
    let volumes = json!([
        { "name": "scratch", "emptyDir": { "medium": "Memory", "sizeLimit": "64Mi" } },
        { "name": "plain" },
        { "name": "nfs", "nfs": { "server": "s", "path": "/" } },
        { "name": "map", "configMap": { "name": "m" } },
        { "name": "disk", "persistentVolumeClaim": { "claimName": "disk" } },
    ]);
    let mounts = json!([
        { "name": "map", "mountPath": "/etc/app", "subPath": "a" },
        { "name": "nfs", "mountPath": "/nfs" },
        { "name": "disk", "mountPath": "/disk", "subPath": "x", "readOnly": true },
        { "name": "plain", "mountPath": "/plain", "subPathExpr": "$(A)" },
        { "name": "scratch", "mountPath": "/tmp" },
    ]);
    let pod = pod(volumes, mounts);
    let kinds: Vec<_> = pod.spec.volumes.iter().map(Volume::kind).collect();
    let expected = [
        Some(VolumeKind::Memory(64 << 20)),
        Some(VolumeKind::Memory(DEFAULT_SIZE)),
        None,
        Some(VolumeKind::Files),
        Some(VolumeKind::Claim("disk".to_owned())),
    ];
    assert_eq!(kinds, expected);
    let mounts = super::mounts(&pod.spec.containers[0], &pod, Path::new("/run/pod"));
    let shown: Vec<_> = mounts
        .iter()
        .map(|one| (one.target.to_str().unwrap(), one.source.to_str().unwrap(), one.makes, one.read_only))
        .collect();
    let expected = [
        ("/etc/app", "/run/pod/volumes/3", false, true),
        ("/disk", "/run/pod/volumes/4", true, true),
        ("/tmp", "/run/pod/volumes/0", true, false),
    ];
    assert_eq!(shown, expected);
}

#[test]
fn quantities_are_parsed() {
    for (text, bytes) in [
        (json!("1Ki"), Some(1024)),
        (json!("1.5Mi"), Some(3 << 19)),
        (json!("2G"), Some(2_000_000_000)),
        (json!("500m"), Some(1)),
        (json!(4096), Some(4096)),
        (json!("1e3"), Some(1000)),
        (json!("x"), None),
        (Value::Null, None),
    ] {
        assert_eq!(quantity(&text), bytes, "{text}");
    }
}
