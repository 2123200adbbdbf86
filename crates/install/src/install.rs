//! Installation: checks, then changes, then waits.

use std::time::Duration;

use anyhow::{Context as _, bail};

use crate::{
    changes::Change,
    connection::{ApplyMode, Connection, readable},
    object::{Object, ObjectKind},
    objects::objects,
    preflight,
    settings::{Installation, Target, Validation},
    wait,
};

/// How an installation is made.
#[derive(Clone, Copy, Debug)]
pub struct InstallOptions {
    /// Only the checks are made, and what would change is reported.
    pub dry_run: bool,
    /// Objects and fields of other programs are taken over.
    pub force: bool,
    /// Time for the control plane to serve; `None` does not wait.
    pub wait: Option<Duration>,
}

/// Installs a control plane, or changes an installed one. Reports each step as a line.
///
/// # Errors
/// A check fails, and nothing is changed; or the API server refuses an object; or the control plane does not serve in time.
pub async fn install(
    connection: &Connection,
    installation: &Installation,
    options: InstallOptions,
    report: &dyn Fn(&str),
) -> anyhow::Result<()> {
    let target = &installation.target;
    let objects = objects(installation);
    let version = preflight::version(connection).await?;
    report(&format!("Kubernetes {version} at {}", connection.address()));
    let findings = preflight::check(connection, target, &objects, options.force).await?;
    for note in findings.notes {
        report(&format!("note: {note}"));
    }
    if !findings.problems.is_empty() {
        bail!("nothing was changed:\n  {}", findings.problems.join("\n  "));
    }
    let superfluous = superfluous(connection, target, &objects).await?;
    if options.dry_run {
        for (object, change) in findings.changes {
            report(&line(&change.to_string(), &object));
        }
        for object in superfluous {
            report(&line("removed", &object.to_string()));
        }
        report("nothing was changed (--dry-run)");
        return Ok(());
    }
    let (webhooks, others): (Vec<&Object>, _) = objects
        .iter()
        .partition(|object| [ObjectKind::WEBHOOK, ObjectKind::VALIDATION].contains(&object.kind));
    for object in others {
        apply(connection, object, options.force, report).await?;
    }
    for object in superfluous {
        connection.delete(&object).await.map_err(readable).with_context(|| object.to_string())?;
        report(&line("removed", &object.to_string()));
    }
    if let Some(timeout) = options.wait {
        wait::deployment(connection, target, timeout, report).await?;
    }
    // Not before the control plane can answer: the API server refuses the pods that nobody injects.
    for object in webhooks {
        apply(connection, object, options.force, report).await?;
    }
    if let Some(timeout) = options.wait {
        wait::webhook(connection, target, timeout, report).await?;
    }
    Ok(())
}

async fn apply(
    connection: &Connection,
    object: &Object,
    force: bool,
    report: &dyn Fn(&str),
) -> anyhow::Result<()> {
    let before = connection.get(object).await.map_err(readable).with_context(|| object.to_string())?;
    match connection.apply(object, ApplyMode { dry_run: false, force }).await {
        Ok(after) => {
            report(&line(&Change::between(before, after).to_string(), &object.to_string()));
            Ok(())
        }
        Err(error) => bail!(
            "{}; the objects before it are in the cluster: install again, or remove them with `skysail uninstall`",
            preflight::refused(object, error)
        ),
    }
}

/// Returns the objects of an earlier installation with other settings that this one does not have.
async fn superfluous(
    connection: &Connection,
    target: &Target,
    objects: &[Object],
) -> anyhow::Result<Vec<Object>> {
    let mut superfluous = Vec::new();
    for object in all(target) {
        let is_wanted = objects.iter().any(|one| (one.kind, &one.name) == (object.kind, &object.name));
        if is_wanted {
            continue;
        }
        let found = connection.get(&object).await.map_err(readable).with_context(|| object.to_string())?;
        if found.is_some_and(|found| !preflight::is_foreign(&object, &found)) {
            superfluous.push(object);
        }
    }
    Ok(superfluous)
}

/// Returns all objects that an installation may have, for their names and for checks. The images do not exist.
pub(crate) fn all(target: &Target) -> Vec<Object> {
    let (image, arguments) = ("skysail.invalid/image".to_owned(), Vec::new());
    objects(&Installation {
        target: target.clone(),
        control_image: image.clone(),
        proxy_image: image,
        cni: false,
        validation: Validation::Ignore,
        deploys_gateways: true,
        replicas: None,
        arguments,
        plain_port: None,
    })
}

/// Returns the line about an object.
pub(crate) fn line(what: &str, object: &str) -> String {
    format!("  {what:<9}  {object}")
}
