//! The configuration of a gateway with many hosts, and its changes.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use serde_json::{Value, json};

use super::{NAMESPACE, POD};
use crate::certificates::{self, Authority, HostCertificate};

/// Port of the hosts.
pub(super) const PORT: u16 = 8_443;
/// Number of the host whose certificate changes.
const CHANGED: usize = 0;

/// Hosts and their certificates.
pub(super) struct Hosts {
    folder: PathBuf,
    pub(super) authority: Authority,
    /// The certificate of each host, as sent in a handshake.
    pub(super) certificates: Vec<Vec<u8>>,
}

/// A change that is not written yet.
pub(super) struct Prepared {
    number: usize,
    file: PathBuf,
    text: String,
    certificate: Vec<u8>,
}

impl Hosts {
    /// Writes the configuration: a file for each Gateway, with the Secrets and VirtualServices of its hosts. The Secret
    /// that changes has a file of its own.
    pub(super) fn write(folder: &Path, hosts: usize, hosts_per_gateway: usize) -> anyhow::Result<Self> {
        fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        let authority = certificates::authority()?;
        let mut written = Self { folder: folder.to_owned(), authority, certificates: Vec::new() };
        write(&folder.join("pod.yaml"), &documents(&[pod()]))?;
        let numbers: Vec<usize> = (0..hosts).collect();
        for (gateway, numbers) in numbers.chunks(hosts_per_gateway).enumerate() {
            let mut objects = vec![gateway_object(&format!("hosts-{gateway}"), numbers)];
            for &number in numbers {
                let certificate = certificates::of_host(&written.authority, &host(number))?;
                objects.push(virtual_service(number, gateway_name(gateway)));
                match number {
                    CHANGED => write(&written.changed(), &documents(&[secret(number, &certificate)]))?,
                    _ => objects.push(secret(number, &certificate)),
                }
                written.certificates.push(certificate.der);
            }
            write(&folder.join(format!("hosts-{gateway}.yaml")), &documents(&objects))?;
        }
        Ok(written)
    }

    fn changed(&self) -> PathBuf {
        self.folder.join("changed.yaml")
    }

    /// Makes another certificate for the host whose certificate changes.
    pub(super) fn prepare_certificate(&self) -> anyhow::Result<Prepared> {
        let certificate = certificates::of_host(&self.authority, &host(CHANGED))?;
        let text = documents(&[secret(CHANGED, &certificate)]);
        Ok(Prepared { number: CHANGED, file: self.changed(), text, certificate: certificate.der })
    }

    /// Makes the objects of one more host.
    pub(super) fn prepare_host(&self) -> anyhow::Result<Prepared> {
        let number = self.certificates.len();
        let certificate = certificates::of_host(&self.authority, &host(number))?;
        let name = format!("added-{number}");
        let text = documents(&[
            gateway_object(&name, &[number]),
            virtual_service(number, name.clone()),
            secret(number, &certificate),
        ]);
        let file = self.folder.join(format!("{name}.yaml"));
        Ok(Prepared { number, file, text, certificate: certificate.der })
    }

    /// Writes a change. Returns the number of the host that shows it.
    pub(super) fn apply(&mut self, change: Prepared) -> anyhow::Result<usize> {
        let Prepared { number, file, text, certificate } = change;
        match self.certificates.get_mut(number) {
            Some(known) => *known = certificate,
            None => self.certificates.push(certificate),
        }
        let part = file.with_extension("part");
        write(&part, &text)?;
        fs::rename(&part, &file).with_context(|| format!("writing {}", file.display()))?;
        Ok(number)
    }
}

/// Returns the name of a host.
pub(super) fn host(number: usize) -> String {
    format!("host-{number}.example.com")
}

fn gateway_name(number: usize) -> String {
    format!("hosts-{number}")
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}

fn documents(objects: &[Value]) -> String {
    objects.iter().map(|object| format!("---\n{object}\n")).collect()
}

fn object(version: &str, kind: &str, name: &str, more: (&str, Value)) -> Value {
    json!({
        "apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": NAMESPACE}, more.0: more.1,
    })
}

fn pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": POD, "namespace": NAMESPACE, "labels": {"istio": "edge"}},
        "spec": {"serviceAccountName": "default", "containers": [{"name": "istio-proxy", "image": "auto"}]},
        "status": {"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}]},
    })
}

fn gateway_object(name: &str, hosts: &[usize]) -> Value {
    let server = |&number: &usize| {
        json!({
            "port": {"number": PORT, "name": format!("https-{number}"), "protocol": "HTTPS"},
            "hosts": [host(number)],
            "tls": {"mode": "SIMPLE", "credentialName": credential(number)},
        })
    };
    let servers: Vec<Value> = hosts.iter().map(server).collect();
    let spec = json!({"selector": {"istio": "edge"}, "servers": servers});
    object("networking.istio.io/v1", "Gateway", name, ("spec", spec))
}

fn virtual_service(number: usize, gateway: String) -> Value {
    let spec = json!({
        "hosts": [host(number)],
        "gateways": [gateway],
        "http": [{"directResponse": {"status": 200, "body": {"string": host(number)}}}],
    });
    object("networking.istio.io/v1", "VirtualService", &format!("host-{number}"), ("spec", spec))
}

fn credential(number: usize) -> String {
    format!("host-{number}")
}

fn secret(number: usize, certificate: &HostCertificate) -> Value {
    let data = json!({"tls.crt": certificate.chain, "tls.key": certificate.key});
    object("v1", "Secret", &credential(number), ("stringData", data))
}
