import pytest, torch
from mixed_inputs import *
from blockscale.kernels.sm90.mixed_config import Config
from blockscale.dtypes import from_torch
from blockscale.kernels.common.machine_code import usage
from kernel_code import built
pytestmark = pytest.mark.usefixtures("keep_code")
def ordered64(x):
    m,k=x.shape; p=x.new_zeros(m,-(-k//128)*128); p[:,:k]=x
    return p.view(m,-1,4,2,4,2).permute(0,1,3,4,2,5).reshape(m,-1)
@pytest.mark.parametrize("case",[('mxfp8',256,1,384,BF16,True,300,200,True),("nvfp4",192,2,512,BF16,True,259,136,True),("nvfp4",256,1,512,BF16,True,259,136,True),('mxfp4',192,1,320,FP32,False,200,136,False),('mxfp8_e5m2',192,1,640,FP32,False,150,136,True)])
def test_it(case):
    fmt,rows,split,k,dt,tma,m,n,asy=case
    c=Config(fmt,from_torch(dt),rows,split,stages=3,tma_store=tma,async_scales=asy)
    a=operand('bf16',m,k,1)[0]; b=operand(fmt,n,k,2)
    try:
        got=emulated(c,(ordered64(a),None),b,multiprocessors=2,completion='random')
    finally:
        print(fmt,rows,usage(built(c).__cubin__))
    assert_close(got,a.double(),dequantized(fmt,*b))
