//! Public keys for the verification of service account tokens, from watched files.

use std::{fs, path::PathBuf, sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use serde_json::Value;
use skysail_core::names::TOKEN_AUDIENCE;
use skysail_identity::{Live, Verifier, jwks::KeySet};
use skysail_source::watch_folder;
use tokio::sync::Notify;
use tracing::{info, warn};

use crate::audit::{AuditEvent, AuditLog};

/// Interval at which the files are read without a file event.
const POLL_INTERVAL: Duration = Duration::from_secs(10);

/// Files with the keys, and the verifier that uses them.
pub(crate) struct TokenKeys {
    /// File with one key (PEM).
    pub(crate) key: Option<PathBuf>,
    /// File with a JSON Web Key Set (RFC 7517).
    pub(crate) jwks: Option<PathBuf>,
    /// Accepted values of the `iss` claim.
    pub(crate) issuers: Vec<String>,
    pub(crate) verifier: Arc<Live<Verifier>>,
}

/// Content of the files: key, key set.
type KeyFiles = [Option<Vec<u8>>; 2];

impl TokenKeys {
    fn read(&self) -> anyhow::Result<KeyFiles> {
        let read = |option: &str, path: &Option<PathBuf>| {
            let read =
                |path: &PathBuf| fs::read(path).with_context(|| format!("{option} {}", path.display()));
            path.as_ref().map(read).transpose()
        };
        Ok([read("--token-key", &self.key)?, read("--token-jwks", &self.jwks)?])
    }

    fn verifier(&self, texts: &KeyFiles) -> anyhow::Result<Option<Verifier>> {
        let [key, jwks] = texts;
        let mut keys = match key {
            Some(pem) => KeySet::of_pem(pem).context("--token-key")?,
            None => KeySet::default(),
        };
        if let Some(text) = jwks {
            let set =
                KeySet::parse(text).map_err(|why| anyhow::anyhow!("--token-jwks {why}"))?.without_secrets();
            let all = serde_json::from_slice::<Value>(text)?["keys"].as_array().map_or(0, Vec::len);
            if set.0.is_empty() {
                bail!(
                    "--token-jwks has {all} keys, but no public key for RSA, EC P-256, EC P-384 or Ed25519"
                );
            }
            if set.0.len() < all {
                warn!(ignored = all - set.0.len(), "--token-jwks has keys of unsupported types");
            }
            keys.0.extend(set.0);
        }
        Ok((!keys.0.is_empty()).then(|| Verifier::new(keys, TOKEN_AUDIENCE, &self.issuers)))
    }

    /// Reads the keys at start.
    ///
    /// # Errors
    /// When a file cannot be read or has no usable key.
    pub(crate) fn load(&self) -> anyhow::Result<KeyFiles> {
        let texts = self.read()?;
        if let Some(verifier) = self.verifier(&texts)? {
            self.verifier.set(Arc::new(verifier));
        }
        Ok(texts)
    }

    /// Reads the files. Returns their content and its verifier, or `None` if the content is still `texts`.
    fn read_changed(&self, texts: &KeyFiles) -> anyhow::Result<Option<(KeyFiles, Option<Verifier>)>> {
        let now = self.read()?;
        if now == *texts {
            return Ok(None);
        }
        let verifier = self.verifier(&now)?;
        Ok(Some((now, verifier)))
    }

    /// Watches the files until the process ends. `texts` is the content that [`Self::load`] returned.
    pub(crate) async fn follow(self, mut texts: KeyFiles, audit: Arc<AuditLog>) {
        let changed = Arc::new(Notify::new());
        let folders = [&self.key, &self.jwks].into_iter().flatten().filter_map(|path| path.parent());
        let _watchers: Vec<_> = folders.map(|folder| watch_folder(folder, &changed)).collect();
        let mut last_error = None;
        loop {
            let _ = tokio::time::timeout(POLL_INTERVAL, changed.notified()).await;
            match self.read_changed(&texts) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unchanged_files_are_not_parsed_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.json");
        let keys =
            TokenKeys { key: None, jwks: Some(path.clone()), issuers: Vec::new(), verifier: Live::empty() };
        // Each parse logs that the second key is ignored.
        let key_set = |modulus: &str| {
            format!(r#"{{"keys": [{{"kty": "RSA", "n": "{modulus}", "e": "AQAB"}}, {{"kty": "other"}}]}}"#)
        };
        fs::write(&path, key_set("AQAB")).unwrap();
        let texts = keys.load().unwrap();
        assert!(keys.read_changed(&texts).unwrap().is_none());
        fs::write(&path, key_set("AQAC")).unwrap();
        let (texts, verifier) = keys.read_changed(&texts).unwrap().unwrap();
        assert!(verifier.is_some() && keys.read_changed(&texts).unwrap().is_none());
        fs::write(&path, "{}").unwrap();
        assert!(keys.read_changed(&texts).is_err());
    }
}
