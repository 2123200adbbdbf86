//! Certificates that have expired or soon will, gateways that use them, and settings that verify no
//! server or client.

use std::collections::{BTreeMap, BTreeSet};

use x509_parser::pem::Pem;

use super::{
    super::{ObjectReport, Report},
    gateways::written,
};
use crate::{
    analysis::Code,
    api::{
        DestinationRule, Kind,
        destination_rule::{ClientTls, ClientTlsMode},
        gateway::ServerTls,
        mesh_config::OutboundMode,
    },
    world::SECRET,
};

/// Time before the end of a certificate from which it is reported, in seconds: 14 days.
const SOON: i64 = 14 * 24 * 60 * 60;

impl Report<'_> {
    /// Reports certificates of Secrets that are not valid at the time `now`, in seconds since 1970, or that expire
    /// soon.
    pub(super) fn certificates(&mut self, now: i64) {
        let world = self.world.unrecorded();
        let mut expired = BTreeMap::new();
        for entry in world.secrets.iter() {
            let Some(pair) = entry.object.spec.pair() else { continue };
            let about = ObjectReport { entry, kind: Kind::Secret };
            let blocks = Pem::iter_from_buffer(pair.chain).filter_map(Result::ok);
            let valid = blocks.filter_map(|block| {
                let certificate = block.parse_x509().ok()?;
                let validity = certificate.validity();
                Some((validity.not_before.timestamp(), validity.not_after.timestamp()))
            });
            let Some((from, until)) = valid.reduce(|one, other| (one.0.max(other.0), one.1.min(other.1)))
            else {
                continue;
            };
            let (code, message) = if now >= until {
                (Code::CertificateExpired, format!("the certificate expired on {}", day(until)))
            } else if now < from {
                (Code::CertificateExpired, format!("the certificate is not valid before {}", day(from)))
            } else if until - now < SOON {
                (Code::CertificateExpiresSoon, format!("the certificate expires on {}", day(until)))
            } else {
                continue;
            };
            if code == Code::CertificateExpired {
                expired.insert((about.namespace(), entry.object.meta.name.as_str()), message.clone());
            }
            self.report(&about, code, "data", message, "renew it");
        }
        self.expired_at_gateways(&expired);
    }

    /// Reports servers whose Secrets have a certificate that is not valid. `expired` has the reasons by namespace and
    /// name.
    fn expired_at_gateways(&mut self, expired: &BTreeMap<(&str, &str), String>) {
        let names: BTreeSet<&str> = expired.keys().map(|(_, name)| *name).collect();
        for entry in written(self.world.unrecorded()) {
            let about = ObjectReport { entry, kind: Kind::Gateway };
            let spec = &entry.object.spec;
            for (index, server) in spec.servers.iter().enumerate() {
                let used = server
                    .tls
                    .iter()
                    .flat_map(|tls| tls.credentials())
                    .map(|name| name.strip_prefix(SECRET).unwrap_or(name));
                for name in used.filter(|name| names.contains(name)) {
                    for namespace in self.namespaces(&spec.selector) {
                        let Some(reason) = expired.get(&(namespace.as_str(), name)) else { continue };
                        let message = format!("Secret {namespace}/{name}: {reason}");
                        let field = format!("spec.servers[{index}].tls.credentialName");
                        self.report(&about, Code::CertificateExpired, field, message, "renew it");
                    }
                }
            }
        }
    }

    /// Reports TLS settings that do not verify the server, or verify it with the roots of the system.
    pub(super) fn server_verification(&mut self) {
        let world = self.world.unrecorded();
        for entry in world.destination_rules.iter() {
            let about = ObjectReport { entry, kind: Kind::DestinationRule };
            for (field, tls) in tls_settings(&entry.object.spec) {
                if !matches!(tls.mode, ClientTlsMode::Simple | ClientTlsMode::Mutual) {
                    continue;
                }
                if tls.insecure_skip_verify == Some(true) {
                    let message = "the certificate of the server is not verified";
                    let remedy = "remove insecureSkipVerify, and set caCertificates or credentialName";
                    let field = format!("{field}.insecureSkipVerify");
                    self.report(&about, Code::NoServerVerification, field, message, remedy);
                } else if tls.ca_certificates.is_empty() && tls.credential_name.is_empty() {
                    let message = "the roots of the proxy's system verify the server";
                    let remedy = "set caCertificates or credentialName if the server has a private root";
                    self.report(&about, Code::SystemRoots, field, message, remedy);
                }
            }
        }
        self.unknown_hosts_verification();
    }

    /// Reports that the certificates of unknown hosts are not verified.
    fn unknown_hosts_verification(&mut self) {
        let world = self.world.unrecorded();
        let policy = &world.mesh().outbound_traffic_policy;
        let (Some(entry), Some(tls)) = (&world.mesh, &policy.tls) else { return };
        let originates = matches!(tls.mode, ClientTlsMode::Simple | ClientTlsMode::Mutual);
        if policy.mode == OutboundMode::AllowAnyDynamicDns
            && originates
            && tls.insecure_skip_verify == Some(true)
        {
            let about = ObjectReport { entry, kind: Kind::ConfigMap };
            let field = "data.mesh.outboundTrafficPolicy.tls.insecureSkipVerify";
            let message = "the certificates of unknown hosts are not verified";
            let remedy = "remove insecureSkipVerify, and set caCertificates if the hosts have private roots";
            self.report(&about, Code::NoServerVerification, field, message, remedy);
        }
    }

    /// Reports servers of Gateways that accept clients whose certificate is not valid.
    pub(super) fn client_verification(&mut self) {
        for entry in written(self.world.unrecorded()) {
            let about = ObjectReport { entry, kind: Kind::Gateway };
            for (index, server) in entry.object.spec.servers.iter().enumerate() {
                if server.tls.as_ref().is_some_and(ServerTls::accepts_untrusted) {
                    let field = format!("spec.servers[{index}].tls.insecureSkipVerify");
                    let message = "clients with an invalid certificate are accepted";
                    let remedy = "remove it; mode OPTIONAL_MUTUAL accepts clients without a certificate";
                    self.report(&about, Code::NoClientVerification, field, message, remedy);
                }
            }
        }
    }
}

/// Returns the TLS settings of a rule, with their fields.
fn tls_settings(spec: &DestinationRule) -> impl Iterator<Item = (String, &ClientTls)> {
    let of_rule = spec.traffic_policy.iter().map(|policy| ("spec.trafficPolicy".to_owned(), policy));
    let subsets = spec.subsets.iter().enumerate();
    let of_subsets = subsets.filter_map(|(index, subset)| {
        Some((format!("spec.subsets[{index}].trafficPolicy"), subset.traffic_policy.as_ref()?))
    });
    of_rule.chain(of_subsets).flat_map(|(at, policy)| {
        let own = policy.tls.iter().map({
            let at = at.clone();
            move |tls| (format!("{at}.tls"), tls)
        });
        let ports = policy.port_level_settings.iter().enumerate();
        let of_ports = ports.filter_map(move |(index, port)| {
            Some((format!("{at}.portLevelSettings[{index}].tls"), port.tls.as_ref()?))
        });
        own.chain(of_ports)
    })
}

/// Returns the date of a time in seconds since 1970.
fn day(time: i64) -> String {
    chrono::DateTime::from_timestamp(time, 0).map_or_else(String::new, |time| time.date_naive().to_string())
}
