//! TLS of the dialer. Decides whom we trust (the system's roots and
//! `network.extra_ca`), for which name a certificate must be valid, and how a
//! refusal reads: with the certificate's subject and issuer and the key that
//! would fix it.
//!
//! TLS 1.2 and 1.3, ring as the only provider, ALPN exactly `http/1.1`
//! (HTTP-19, T-25), since every upgrade needs it.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_name;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as RustlsError, OtherError, SignatureScheme,
};
use rustls_platform_verifier::Verifier;
use tokio::net::TcpStream;
use tokio::sync::OnceCell;
use tokio_rustls::TlsConnector;

use crate::certificate::CertificateText;
use crate::config::ConfigError;
use crate::stream::{TlsOverTcp, buffered};

/// How one target proves who it is.
#[derive(Debug, Clone)]
pub struct TlsParameters {
    /// Sent as SNI.
    pub server_name: String,
    /// Name the certificate must be valid for, when it differs from
    /// `server_name` (`DERPNode.CertName`).
    pub certificate_name: Option<String>,
    /// No check at all. Only for relays marked so, behind a daemon flag (T-24).
    pub insecure: bool,
}

impl TlsParameters {
    pub fn for_host(host: &str) -> TlsParameters {
        TlsParameters { server_name: host.to_owned(), certificate_name: None, insecure: false }
    }
}

/// What is wrong with a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsFault {
    /// No root we trust signed it.
    UnknownIssuer,
    Expired,
    NotYetValid,
    /// Valid, but for other names.
    WrongName,
    Other,
}

/// Why TLS did not come about.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TlsError {
    #[error(transparent)]
    Certificate(Box<Refusal>),
    #[error(
        "no trust roots: this system has no CA certificates; install the package \
         ca-certificates or name a PEM file in network.extra_ca ({reason})"
    )]
    NoRoots { reason: String },
    #[error("the server does not speak TLS on this port: {reason}")]
    NotTls { reason: String },
    #[error("{name} is not a name TLS can check")]
    InvalidName { name: String },
    #[error("TLS handshake failed: {reason}")]
    Handshake { reason: String },
}

/// A certificate that was not accepted.
#[derive(Debug, Clone)]
pub struct Refusal {
    pub fault: TlsFault,
    /// The name it should have been valid for.
    pub wanted: String,
    pub subject: String,
    pub issuer: String,
    /// The verifier's own words.
    pub detail: String,
}

impl std::error::Error for Refusal {}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Refusal { fault, wanted, subject, issuer, detail } = self;
        match fault {
            TlsFault::UnknownIssuer => write!(
                f,
                "the certificate of {wanted} (subject \"{subject}\") was issued by \"{issuer}\", which this machine \
                 does not trust; if you trust that issuer, put its certificate as PEM into a file and name the file in \
                 network.extra_ca"
            ),
            TlsFault::Expired => write!(
                f,
                "the certificate of {wanted} (subject \"{subject}\", issuer \"{issuer}\") has expired; the server \
                 needs a new one (or this machine's clock is wrong): {detail}"
            ),
            TlsFault::NotYetValid => write!(
                f,
                "the certificate of {wanted} (subject \"{subject}\", issuer \"{issuer}\") is not valid yet; is this \
                 machine's clock right? {detail}"
            ),
            TlsFault::WrongName => write!(
                f,
                "the certificate (subject \"{subject}\", issuer \"{issuer}\") is not valid for {wanted}: {detail}"
            ),
            TlsFault::Other => write!(
                f,
                "the certificate of {wanted} (subject \"{subject}\", issuer \"{issuer}\") is not acceptable: {detail}"
            ),
        }
    }
}

/// Makes TLS connections; the trust roots are loaded when first needed, since
/// reading them takes longer than a whole start over clear text.
pub(crate) struct TlsClient {
    extra: Vec<CertificateDer<'static>>,
    provider: Arc<CryptoProvider>,
    base: OnceCell<Result<Base, TlsError>>,
}

#[derive(Clone)]
struct Base {
    verifier: Arc<Verifier>,
    config: Arc<ClientConfig>,
}

impl TlsClient {
    pub(crate) fn new(extra_ca: Option<&Path>) -> Result<TlsClient, ConfigError> {
        Ok(TlsClient {
            extra: extra_ca.map(read_pem).transpose()?.unwrap_or_default(),
            provider: Arc::new(rustls::crypto::ring::default_provider()),
            base: OnceCell::new(),
        })
    }

    pub(crate) async fn handshake(&self, tcp: TcpStream, parameters: &TlsParameters) -> Result<TlsOverTcp, TlsError> {
        let config = self.config(parameters).await?;
        let name = server_name(&parameters.server_name)?;
        TlsConnector::from(config).connect(name, buffered(tcp)).await.map_err(|error| classify(&error))
    }

    async fn config(&self, parameters: &TlsParameters) -> Result<Arc<ClientConfig>, TlsError> {
        if parameters.insecure {
            return self.assemble(Arc::new(NoVerifier { provider: self.provider.clone() }));
        }
        let base = self.base.get_or_init(|| self.load()).await.clone()?;
        match &parameters.certificate_name {
            None => Ok(base.config),
            Some(name) => self.assemble(Arc::new(ExplainingVerifier {
                inner: base.verifier,
                extra: self.extra.clone(),
                name: Some(server_name(name)?),
            })),
        }
    }

    /// Reads the system's roots on a thread that may block.
    async fn load(&self) -> Result<Base, TlsError> {
        let extra = self.extra.clone();
        let provider = self.provider.clone();
        let load = tokio::task::spawn_blocking(move || Verifier::new_with_extra_roots(extra, provider));
        let verifier = match load.await {
            Ok(Ok(verifier)) => Arc::new(verifier),
            Ok(Err(error)) => {
                return Err(TlsError::NoRoots { reason: error.to_string() });
            }
            Err(error) => {
                return Err(TlsError::Handshake { reason: error.to_string() });
            }
        };
        let config = self.assemble(Arc::new(ExplainingVerifier {
            inner: verifier.clone(),
            extra: self.extra.clone(),
            name: None,
        }))?;
        Ok(Base { verifier, config })
    }

    fn assemble(&self, verifier: Arc<dyn ServerCertVerifier>) -> Result<Arc<ClientConfig>, TlsError> {
        let mut config = ClientConfig::builder_with_provider(self.provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(|error| TlsError::Handshake { reason: error.to_string() })?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

fn read_pem(path: &Path) -> Result<Vec<CertificateDer<'static>>, ConfigError> {
    let unreadable = |reason: String| ConfigError::ExtraCa { path: path.to_owned(), reason };
    let pem = std::fs::read(path).map_err(|error| unreadable(error.to_string()))?;
    let certificates = CertificateDer::pem_slice_iter(&pem)
        .collect::<Result<Vec<_>, _>>()
        .map_err(|error| unreadable(error.to_string()))?;
    if certificates.is_empty() {
        return Err(ConfigError::ExtraCaEmpty { path: path.to_owned() });
    }
    // A file that is not usable as a root must fail now, with its name.
    let mut roots = rustls::RootCertStore::empty();
    for certificate in &certificates {
        roots.add(certificate.clone()).map_err(|error| unreadable(error.to_string()))?;
    }
    Ok(certificates)
}

fn server_name(name: &str) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(name.trim_end_matches('.').to_owned())
        .map_err(|_| TlsError::InvalidName { name: name.to_owned() })
}

fn classify(error: &io::Error) -> TlsError {
    let rustls = error.get_ref().and_then(|inner| inner.downcast_ref::<RustlsError>());
    match rustls {
        Some(RustlsError::InvalidCertificate(CertificateError::Other(OtherError(other)))) => {
            match other.downcast_ref::<TlsError>() {
                Some(own) => own.clone(),
                None => TlsError::Handshake { reason: other.to_string() },
            }
        }
        Some(RustlsError::InvalidMessage(message)) => TlsError::NotTls { reason: format!("{message:?}") },
        Some(other) => TlsError::Handshake { reason: other.to_string() },
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            TlsError::Handshake { reason: "the server closed the connection during the handshake".into() }
        }
        None => TlsError::Handshake { reason: error.to_string() },
    }
}

/// The platform's verifier, with a name of its own to check and with refusals
/// that say whose certificate it was.
///
/// A certificate that is itself in `network.extra_ca` is accepted although it
/// is marked as a CA. `openssl req -x509` marks every self-signed certificate
/// so, and users of such a server expect that naming it is enough, as it is
/// for curl and for Go's client.
#[derive(Debug)]
struct ExplainingVerifier {
    inner: Arc<Verifier>,
    extra: Vec<CertificateDer<'static>>,
    name: Option<ServerName<'static>>,
}

impl ExplainingVerifier {
    /// The verifier looks at the dates before it objects to the mark, so only
    /// the name is left to check.
    fn is_named_itself(
        &self,
        error: &RustlsError,
        end_entity: &CertificateDer<'_>,
        wanted: &ServerName<'_>,
    ) -> Option<Result<ServerCertVerified, RustlsError>> {
        let RustlsError::InvalidCertificate(CertificateError::Other(OtherError(other))) = error else { return None };
        let marked = matches!(other.downcast_ref(), Some(webpki::Error::CaUsedAsEndEntity));
        if !marked || !self.extra.contains(end_entity) {
            return None;
        }
        let checked = ParsedCertificate::try_from(end_entity).and_then(|parsed| verify_server_name(&parsed, wanted));
        Some(checked.map(|()| ServerCertVerified::assertion()))
    }
}

impl ServerCertVerifier for ExplainingVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, RustlsError> {
        let wanted = self.name.as_ref().unwrap_or(server_name);
        self.inner
            .verify_server_cert(end_entity, intermediates, wanted, ocsp_response, now)
            .or_else(|error| self.is_named_itself(&error, end_entity, wanted).unwrap_or(Err(error)))
            .map_err(|error| explain(&error, end_entity, intermediates, wanted))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

fn explain(
    error: &RustlsError,
    end_entity: &CertificateDer<'_>,
    intermediates: &[CertificateDer<'_>],
    wanted: &ServerName<'_>,
) -> RustlsError {
    let leaf = CertificateText::parse(end_entity);
    let fault = match error {
        RustlsError::InvalidCertificate(reason) => match reason {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => TlsFault::UnknownIssuer,
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => TlsFault::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => TlsFault::NotYetValid,
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => TlsFault::WrongName,
            // A self-signed certificate that is itself marked as a CA.
            CertificateError::Other(_) if leaf.subject == leaf.issuer => TlsFault::UnknownIssuer,
            _ => TlsFault::Other,
        },
        _ => TlsFault::Other,
    };
    // The top of what was presented names the root that is missing.
    let issuer = match (fault, intermediates.last()) {
        (TlsFault::UnknownIssuer, Some(top)) => CertificateText::parse(top).issuer,
        _ => leaf.issuer,
    };
    let refusal = Refusal {
        fault,
        wanted: wanted.to_str().into_owned(),
        subject: leaf.subject,
        issuer,
        detail: crate::certificate::bounded(&error.to_string()),
    };
    let own = TlsError::Certificate(Box::new(refusal));
    RustlsError::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(own))))
}

/// Accepts any certificate (`InsecureForTests` behind the daemon's flag).
struct NoVerifier {
    provider: Arc<CryptoProvider>,
}

impl fmt::Debug for NoVerifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NoVerifier")
    }
}

impl ServerCertVerifier for NoVerifier {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, RustlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        rustls::crypto::verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, RustlsError> {
        rustls::crypto::verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
