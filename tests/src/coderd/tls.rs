//! Certificates of a deployment: an authority of its own, written to a file for `network.extra_ca`, and a server
//! certificate signed by it.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context as _;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use tempfile::TempDir;

/// An authority that only this deployment knows.
pub struct Authority {
    certificate: Certificate,
    issuer: Issuer<'static, KeyPair>,
    file: PathBuf,
    _folder: TempDir,
}

impl Authority {
    /// Writes its certificate to a file of its own.
    pub fn new(name: &str) -> anyhow::Result<Self> {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().context("cannot make a key")?;
        let certificate = params.self_signed(&key).context("cannot make a certificate")?;
        let folder = tempfile::tempdir().context("cannot make a folder for the certificate")?;
        let file = folder.path().join("ca.pem");
        std::fs::write(&file, certificate.pem()).context("cannot write the certificate")?;
        Ok(Self { certificate, issuer: Issuer::new(params, key), file, _folder: folder })
    }

    /// PEM file of the authority.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// A server that shows a certificate for these names and addresses.
    pub fn server(&self, names: &[String]) -> anyhow::Result<Arc<ServerConfig>> {
        let mut params = CertificateParams::new(names.to_vec()).context("cannot make a certificate for these names")?;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.distinguished_name.push(DnType::CommonName, "testbed");
        let key = KeyPair::generate().context("cannot make a key")?;
        let certificate = params.signed_by(&key, &self.issuer).context("cannot sign a certificate")?;
        let chain = vec![certificate.der().clone(), self.certificate.der().clone()];
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .context("no TLS versions")?
            .with_no_client_auth()
            .with_single_cert(chain, key)
            .context("cannot use the certificate")?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Authority").field("file", &self.file).finish_non_exhaustive()
    }
}

/// What a certificate for a server at this address has to name.
pub fn names_of(address: IpAddr, further: &[String]) -> Vec<String> {
    let mut names = vec![address.to_string(), "localhost".to_owned()];
    names.extend(further.iter().cloned());
    names
}
