//! Public keys for the verification of service account tokens, from watched files or from the API server of the cluster.

use std::{
    fs,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use serde_json::Value;
use skysail_core::names::TOKEN_AUDIENCE;
use skysail_identity::{Live, Verifier, jwks::KeySet};
use skysail_kubernetes::{ApiServer, TokenIssuer};
use skysail_source::watch_folder;
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::audit::{AuditEvent, AuditLog};

/// Interval at which the files are read without a file event.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which the API server is asked for its keys.
const CLUSTER_INTERVAL: Duration = Duration::from_secs(60);

/// Sources of the keys, and the verifier that uses them.
pub(crate) struct TokenKeys {
    /// File with one key (PEM).
    pub(crate) key: Option<PathBuf>,
    /// File with a JSON Web Key Set (RFC 7517).
    pub(crate) jwks: Option<PathBuf>,
    /// API server whose keys are used if there is no file.
    pub(crate) server: Option<ApiServer>,
    /// Accepted values of the `iss` claim, besides that of the API server.
    pub(crate) issuers: Vec<String>,
    pub(crate) verifier: Arc<Live<Verifier>>,
}

/// Content of the sources.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeyTexts {
    key: Option<Vec<u8>>,
    jwks: Option<Vec<u8>>,
    cluster: Option<TokenIssuer>,
}

impl TokenKeys {
    /// Returns the content of the files.
    fn read(&self) -> anyhow::Result<KeyTexts> {
        let read = |option: &str, path: &Option<PathBuf>| {
            let read =
                |path: &PathBuf| fs::read(path).with_context(|| format!("{option} {}", path.display()));
            path.as_ref().map(read).transpose()
        };
        let (key, jwks) = (read("--token-key", &self.key)?, read("--token-jwks", &self.jwks)?);
        Ok(KeyTexts { key, jwks, cluster: None })
    }

    /// Returns the content of the files, and the keys of the API server. They are those in `texts` if `asked` is recent.
    async fn read_all(&self, texts: &KeyTexts, asked: &mut Option<Instant>) -> anyhow::Result<KeyTexts> {
        let mut now = self.read()?;
        let Some(server) = &self.server else { return Ok(now) };
        if asked.is_some_and(|asked| asked.elapsed() < CLUSTER_INTERVAL) {
            now.cluster.clone_from(&texts.cluster);
            return Ok(now);
        }
        *asked = Some(Instant::now());
        let issuer = server.token_issuer().await.context("the keys of service account tokens")?;
        now.cluster = Some(issuer);
        Ok(now)
    }

    fn verifier(&self, texts: &KeyTexts) -> anyhow::Result<Option<Verifier>> {
        let mut keys = match &texts.key {
            Some(pem) => KeySet::of_pem(pem).context("--token-key")?,
            None => KeySet::default(),
        };
        let mut issuers = self.issuers.clone();
        if let Some(text) = &texts.jwks {
            keys.0.extend(key_set("--token-jwks", text)?.0);
        }
        if let Some(issuer) = &texts.cluster {
            keys.0.extend(key_set("the key set of the API server", issuer.keys.as_bytes())?.0);
            issuers.push(issuer.name.clone());
        }
        Ok((!keys.0.is_empty()).then(|| Verifier::new(keys, TOKEN_AUDIENCE, &issuers)))
    }

    /// Reads the keys at start.
    ///
    /// # Errors
    /// When a source cannot be read or has no usable key.
    pub(crate) async fn load(&self) -> anyhow::Result<KeyTexts> {
        let texts = self.read_all(&KeyTexts::default(), &mut None).await?;
        if let Some(verifier) = self.verifier(&texts)? {
            self.verifier.set(Arc::new(verifier));
        }
        Ok(texts)
    }

    /// Reads the sources. Returns their content and its verifier, or `None` if the content is still `texts`.
    async fn read_changed(
        &self,
        texts: &KeyTexts,
        asked: &mut Option<Instant>,
    ) -> anyhow::Result<Option<(KeyTexts, Option<Verifier>)>> {
        let now = self.read_all(texts, asked).await?;
        if now == *texts {
            return Ok(None);
        }
        let verifier = self.verifier(&now)?;
        Ok(Some((now, verifier)))
    }

    /// Follows the sources until the process ends. `texts` is the content that [`Self::load`] returned.
    pub(crate) async fn follow(self, mut texts: KeyTexts, audit: Arc<AuditLog>) {
        let changed = Arc::new(Notify::new());
        let folders = [&self.key, &self.jwks].into_iter().flatten().filter_map(|path| path.parent());
        let _watchers: Vec<_> = folders.map(|folder| watch_folder(folder, &changed)).collect();
        let (mut last_error, mut asked) = (None, Some(Instant::now()));
        loop {
            let _ = tokio::time::timeout(POLL_INTERVAL, changed.notified()).await;
            match self.read_changed(&texts, &mut asked).await {
                Ok(None) => last_error = None,
                Ok(Some((now, verifier))) => {
                    (texts, last_error) = (now, None);
                    if let Some(verifier) = verifier {
                        self.verifier.set(Arc::new(verifier));
                        info!("token keys replaced");
                        let files = [&self.key, &self.jwks].into_iter().flatten();
                        let files: Vec<_> = files.map(|file| file.display().to_string()).collect();
                        audit.record(AuditEvent::TokensChanged { files: &files });
                    }
                }
                Err(error) => {
                    let error = format!("{error:#}");
                    if last_error.as_ref() != Some(&error) {
                        warn!(error, "token keys cannot be read; the last valid keys stay in use");
                    }
                    last_error = Some(error);
                }
            }
        }
    }
}

/// Returns the public keys of a key set. `source` names it in messages.
fn key_set(source: &str, text: &[u8]) -> anyhow::Result<KeySet> {
    let set = KeySet::parse(text).map_err(|why| anyhow::anyhow!("{source} {why}"))?.without_secrets();
    let all = serde_json::from_slice::<Value>(text)?["keys"].as_array().map_or(0, Vec::len);
    if set.0.is_empty() {
        bail!("{source} has {all} keys, but no public key for RSA, EC P-256, EC P-384 or Ed25519");
    }
    if set.0.len() < all {
        warn!(ignored = all - set.0.len(), "{source} has keys of unsupported types");
    }
    Ok(set)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn unchanged_files_are_not_parsed_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.json");
        let jwks = Some(path.clone());
        let keys = TokenKeys { key: None, jwks, server: None, issuers: Vec::new(), verifier: Live::empty() };
        // Each parse logs that the second key is ignored.
        let key_set = |modulus: &str| {
            format!(r#"{{"keys": [{{"kty": "RSA", "n": "{modulus}", "e": "AQAB"}}, {{"kty": "other"}}]}}"#)
        };
        fs::write(&path, key_set("AQAB")).unwrap();
        let texts = keys.load().await.unwrap();
        assert!(keys.read_changed(&texts, &mut None).await.unwrap().is_none());
        fs::write(&path, key_set("AQAC")).unwrap();
        let (texts, verifier) = keys.read_changed(&texts, &mut None).await.unwrap().unwrap();
        assert!(verifier.is_some() && keys.read_changed(&texts, &mut None).await.unwrap().is_none());
        fs::write(&path, "{}").unwrap();
        assert!(keys.read_changed(&texts, &mut None).await.is_err());
    }
}
