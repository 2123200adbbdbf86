//! Control planes of a cluster share the certificate authority in its Secrets.

use std::{fs, process::Command};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, KeyUsagePurpose};
use serde_json::{Value, json};
use skysail_testkit::eventually;

use crate::{cluster::Cluster, replica::Replica};

/// Number of roots, name of the one that signs, and problem of an authority.
type Signing = (usize, String, Option<String>);

/// Returns a value of a Secret.
fn value(cluster: &Cluster, secret: &str, key: &str) -> String {
    let secret: Value =
        serde_json::from_str(&cluster.done(&["get", "secret", secret, "-o", "json"], "")).unwrap();
    let value = secret["data"][key].as_str().unwrap();
    String::from_utf8(STANDARD.decode(value).unwrap()).unwrap()
}

fn secret(name: &str, kind: &str, values: &[(&str, &str)]) -> String {
    let data: Value = values
        .iter()
        .map(|(key, value)| ((*key).to_owned(), STANDARD.encode(value).into()))
        .collect::<serde_json::Map<_, _>>()
        .into();
    json!({"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": {"name": name}, "data": data})
        .to_string()
}

/// Returns a root and its key.
fn root(name: &str) -> (String, String) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

#[test]
fn replicas_have_one_root_which_outlives_them() {
    let Some(cluster) = Cluster::start(&[]) else { return };
    // All start at once, without a Secret.
    let starting = [(); 3].map(|()| Replica::spawn(&cluster, None, &[]));
    let mut replicas = starting.map(Replica::started);
    let (step, roots) = replicas[0].roots();
    assert_eq!((&*step, roots.len()), ("settled", 1));
    for replica in &replicas {
        assert_eq!(replica.roots().1, roots);
    }
    let kind = cluster.done(&["get", "secret", "istio-ca-secret", "-o", "jsonpath={.type}"], "");
    assert_eq!(kind, "istio.io/ca-root");
    let certificate = value(&cluster, "istio-ca-secret", "ca-cert.pem");
    replicas.iter_mut().for_each(Replica::kill);

    let replica = Replica::start(&cluster, &[]);
    assert_eq!(replica.roots().1, roots);
    // A Secret that is deleted meanwhile is written again.
    cluster.done(&["delete", "secret", "istio-ca-secret"], "");
    eventually("the Secret is written again", || {
        let found = cluster.kubectl(&["get", "secret", "istio-ca-secret"], "");
        if found.status.success() { Ok(()) } else { Err("there is none".to_owned()) }
    });
    assert_eq!(value(&cluster, "istio-ca-secret", "ca-cert.pem"), certificate);
}

#[test]
fn a_rotation_is_that_of_all_replicas() {
    let Some(cluster) = Cluster::start(&[]) else { return };
    let short = ["--cert-ttl", "10s", "--ca-root-ttl", "1h"];
    let (first, second) = (Replica::start(&cluster, &short), Replica::start(&cluster, &short));
    let (_, before) = first.roots();
    assert_eq!(first.ask("POST", "/ca/rotate").0, 200);
    let mut seen = vec![first.roots()];
    assert_eq!(seen[0].0, "distribute");
    let (status, message) = second.ask("POST", "/ca/rotate");
    assert!(status == 409 && message.contains("already in progress"), "{status} {message}");
    // The one that was asked ends; the other one continues.
    drop(first);
    let third = Replica::start(&cluster, &short);
    eventually("the rotation ends", || {
        for replica in [&second, &third] {
            let roots = replica.roots();
            if !seen.contains(&roots) {
                seen.push(roots);
            }
        }
        if seen.iter().any(|(step, _)| step == "settled") { Ok(()) } else { Err(format!("{seen:?}")) }
    });
    eventually("both have the new root", || {
        let (one, other) = (second.roots(), third.roots());
        if one == other && one.0 == "settled" { Ok(()) } else { Err(format!("{one:?} {other:?}")) }
    });
    let steps: Vec<_> = seen.iter().map(|(step, _)| &**step).collect();
    assert_eq!(
        steps,
        ["distribute", "issue", "retire", "settled"],
        "each step had the same roots at both: {seen:?}"
    );
    let next = &seen[0].1[1];
    assert_eq!(seen[0].1, [before[0].clone(), next.clone()]);
    assert_eq!(seen[1].1, [next.clone(), before[0].clone()]);
    assert_eq!(seen[3].1, std::slice::from_ref(next));
}

#[test]
fn a_secret_of_istiod_is_used() {
    let Some(cluster) = Cluster::start(&[]) else { return };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    // istiod's root has an RSA key in the form of PKCS #1.
    let extensions = ["basicConstraints=critical,CA:TRUE", "keyUsage=critical,digitalSignature,keyCertSign"];
    let request =
        ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/O=cluster.local", "-days", "3650"];
    let made = Command::new("openssl")
        .args(request)
        .args([
            "-addext",
            extensions[0],
            "-addext",
            extensions[1],
            "-keyout",
            &at("pkcs8"),
            "-out",
            &at("certificate"),
        ])
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
    let converted = Command::new("openssl")
        .args(["rsa", "-traditional", "-in", &at("pkcs8"), "-out", &at("key")])
        .output()
        .unwrap();
    assert!(converted.status.success(), "{converted:?}");
    let (certificate, key) =
        (fs::read_to_string(at("certificate")).unwrap(), fs::read_to_string(at("key")).unwrap());
    assert!(key.starts_with("-----BEGIN RSA PRIVATE KEY-----"), "the form of istiod");
    let values =
        [("ca-cert.pem", &*certificate), ("ca-key.pem", &*key), ("cert-chain.pem", ""), ("key.pem", "")];
    cluster.done(&["create", "-f", "-"], &secret("istio-ca-secret", "istio.io/ca-root", &values));
    let replica = Replica::start(&cluster, &[]);
    let status = replica.status();
    assert_eq!(status["kind"], "self-signed");
    assert_eq!(status["roots"][0]["name"], "O=cluster.local");
    assert_eq!(value(&cluster, "istio-ca-secret", "ca-cert.pem"), certificate);
    assert_eq!(value(&cluster, "istio-ca-secret", "ca-key.pem"), key);

    // In a rotation, the keys of Istio are those of the root that signs.
    assert_eq!(replica.ask("POST", "/ca/rotate").0, 200);
    assert_eq!(value(&cluster, "istio-ca-secret", "ca-cert.pem"), certificate);
    assert_eq!(value(&cluster, "istio-ca-secret", "root-cert.pem").matches("BEGIN").count(), 2);
    // istiod would write its certificate anew.
    let again = Replica::start(&cluster, &[]);
    assert_eq!(again.roots(), replica.roots());
}

#[test]
fn a_plugged_in_authority_is_followed_by_all_replicas() {
    let Some(cluster) = Cluster::start(&[]) else { return };
    let (old, new) = (root("old root"), root("new root"));
    let both = format!("{}{}", old.0, new.0);
    let of = |roots: &str, (certificate, key): &(String, String)| {
        secret(
            "cacerts",
            "Opaque",
            &[("root-cert.pem", roots), ("ca-cert.pem", certificate), ("ca-key.pem", key)],
        )
    };
    cluster.done(&["create", "-f", "-"], &of(&old.0, &old));
    let replicas = [(); 2].map(|()| Replica::spawn(&cluster, None, &[])).map(Replica::started);
    let signs = |replica: &Replica| {
        let status = replica.status();
        let roots = status["roots"].as_array().unwrap();
        let signing = roots.iter().find(|root| root["signs"] == true).unwrap();
        (
            roots.len(),
            signing["name"].as_str().unwrap().to_owned(),
            status["problem"].as_str().map(str::to_owned),
        )
    };
    let wait = |what: &str, is_it: &dyn Fn(&Signing) -> bool| {
        for replica in &replicas {
            eventually(what, || {
                let found = signs(replica);
                if is_it(&found) { Ok(()) } else { Err(format!("{found:?}")) }
            });
        }
    };
    wait("the first", &|found| *found == (1, "CN=old root".to_owned(), None));
    // A key of another certificate is not used.
    cluster.done(&["replace", "-f", "-"], &of(&old.0, &(old.0.clone(), new.1.clone())));
    wait("the problem", &|(roots, name, problem)| {
        *roots == 1
            && name == "CN=old root"
            && problem.as_ref().is_some_and(|problem| problem.contains("ca-key.pem"))
    });
    cluster.done(&["replace", "-f", "-"], &of(&both, &new));
    wait("the second", &|found| *found == (2, "CN=new root".to_owned(), None));
    let (status, message) = replicas[0].ask("POST", "/ca/rotate");
    assert!(
        status == 409 && message.contains(&format!("in Secret {}/cacerts", cluster.namespace)),
        "{message}"
    );
    let none = cluster.kubectl(&["get", "secret", "istio-ca-secret"], "");
    assert!(!none.status.success(), "no self-signed authority was made");
}

#[test]
fn without_a_permission_the_start_ends_and_says_which_is_needed() {
    let Some(cluster) = Cluster::start(&[]) else { return };
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": cluster.namespace},
        "rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["get", "list", "watch"]}],
    });
    let account = format!("{}:reader", cluster.namespace);
    cluster.done(&["create", "-f", "-"], &role.to_string());
    cluster.done(&["create", "serviceaccount", "reader"], "");
    let (name, role) = (cluster.namespace.as_str(), format!("--clusterrole={}", cluster.namespace));
    cluster.done(&["create", "clusterrolebinding", name, &role, "--serviceaccount", &account], "");
    let token = cluster.done(&["create", "token", "reader"], "");
    let config = cluster.done(&["config", "view", "--raw", "--flatten", "-o", "json"], "");
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["users"][0]["user"] = json!({"token": token.trim()});
    let refused = Replica::spawn(&cluster, Some(&config.to_string()), &[]).refused();
    cluster.done(&["delete", "clusterrole,clusterrolebinding", name], "");
    for words in [
        "/istio-ca-secret cannot be created",
        "forbidden",
        "needs get, list, watch, create and update for Secrets",
    ] {
        assert!(refused.contains(words), "{words}: {refused}");
    }
}
