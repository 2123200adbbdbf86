//! TLS of gateways with certificates and roots in files, for `skysail-proxy` and for a real Envoy.

use std::{fs, path::Path};

use rcgen::{CertificateParams, KeyPair, SerialNumber};
use skysail_testkit::eventually;

use crate::{
    get, mesh_with,
    pools_tls::revocations,
    secure::{Edges, Issuer, Member, Offer, issuer, member, of_both_kinds, secret},
    wait,
};

const RULES: &str = include_str!("secure_files.yaml");
const HOSTS: [&str; 8] = [
    "one.example",
    "roots.example",
    "pairs.example",
    "pairs-roots.example",
    "mesh.example",
    "listed.example",
    "unlisted.example",
    "untrusted.example",
];

/// Replaces a file as a whole, as a mounted Secret does.
fn put(folder: &Path, name: &str, text: &str) {
    fs::write(folder.join("new"), text).unwrap();
    fs::rename(folder.join("new"), folder.join(name)).unwrap();
}

/// Replaces the certificate of the servers and its key, and returns both.
fn put_server(folder: &Path, issuer: &Issuer) -> [String; 2] {
    let key = KeyPair::generate().unwrap();
    let chain = CertificateParams::new(HOSTS.map(str::to_owned)).unwrap().signed_by(&key, issuer).unwrap();
    let pair = [chain.pem(), key.serialize_pem()];
    put(folder, "server.crt", &pair[0]);
    put(folder, "server.key", &pair[1]);
    pair
}

/// Serial number of a revoked certificate.
const REVOKED: u64 = 7;

fn revoked(issuer: &Issuer) -> Member {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::new(vec!["revoked".to_owned()]).unwrap();
    params.serial_number = Some(SerialNumber::from(REVOKED));
    Member { chain: params.signed_by(&key, issuer).unwrap(), key }
}

#[test]
fn servers_have_certificates_in_files() {
    let [servers, newer, clients, others] = ["servers", "newer", "clients", "others"].map(issuer);
    let folder = tempfile::tempdir().unwrap();
    let [chain, key] = put_server(folder.path(), &servers);
    put(folder.path(), "clients.crt", &clients.pem());
    put(folder.path(), "others.crt", &others.pem());
    let lists = [&clients, &others].map(|issuer| revocations(issuer, REVOKED)).concat();
    put(folder.path(), "revoked.crl", &lists);
    let mut entries = vec![("tls.crt", chain), ("tls.key", key), ("ca.crt", clients.pem())];
    let unlisted = secret("unlisted", &entries);
    entries.push(("ca.crl", lists));
    let both = of_both_kinds(&servers, "kinds.example");
    for (name, of) in &both {
        put(folder.path(), &format!("{name}.crt"), &of.chain.pem());
        put(folder.path(), &format!("{name}.key"), &of.key.serialize_pem());
    }
    let rules = RULES.replace("FOLDER", &folder.path().to_string_lossy());
    let rules = [rules, unlisted, secret("listed", &entries)].concat();
    let setup = mesh_with(&rules, &["shop/edge-envoy"]);
    let mesh = setup.with(&["-p", "0:edge-skysail:443", "-p", "0:edge-envoy:443"]).ready();
    let edges = Edges::of(&mesh, &servers);
    let (known, stranger) = (member(&clients, "client"), member(&others, "client"));
    let revoked = revoked(&clients);
    let without = Offer::default();
    let with = |member| Offer { member: Some(member), ..without };

    for host in ["one.example", "pairs.example"] {
        edges.accept(host, without);
    }
    edges.present("kinds.example", &both);
    for (host, accepted, refused) in
        [("roots.example", &known, &stranger), ("pairs-roots.example", &stranger, &known)]
    {
        edges.accept(host, with(accepted));
        edges.refuse(host, with(refused));
        edges.refuse(host, without);
    }
    for host in ["roots.example", "listed.example", "unlisted.example"] {
        edges.accept(host, with(&known));
        edges.refuse(host, with(&revoked));
    }
    // insecureSkipVerify admits any certificate, but no client without one.
    for client in [&known, &stranger] {
        edges.accept("untrusted.example", with(client));
    }
    edges.refuse("untrusted.example", without);
    // A client of the mesh is accepted; insecureSkipVerify admits no other.
    for host in ["mesh.example", "mesh-envoy.example"] {
        wait(&mesh, "by-skysail", &get(&format!("http://{host}/"), 298, &[]));
        edges.refuse(host, with(&known));
        edges.refuse(host, without);
    }

    // New files take effect without another change.
    put_server(folder.path(), &newer);
    put(folder.path(), "clients.crt", &others.pem());
    let edges = Edges::of(&mesh, &newer);
    for host in ["one.example", "pairs.example"] {
        edges.accept(host, without);
    }
    edges.accept("roots.example", with(&stranger));
    eventually("a certificate of the former roots is refused", || {
        let refused = edges.each(|address| edges.ask(address, "roots.example", with(&known)).is_err());
        if refused == [true; 2] { Ok(()) } else { Err(format!("{refused:?}")) }
    });
}
